"""A small tokenizer and processor with Gemma 3n's special tokens and chat template.

Printable ASCII by the character, everything else by the byte: 512 ids instead of 262 400, so that a tiny model's tables
are tiny too, at the price of one token a letter. The layout is Gemma 3n's: text ids first, then those of the vision and
of the audio vocabulary, with their placeholders among them.
"""

import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

TEXT_IDS, VISION_IDS, AUDIO_IDS = 480, 16, 16
PAD, EOS, BOS, UNK, START_OF_TURN, END_OF_TURN, START_OF_AUDIO, START_OF_IMAGE = 0, 1, 2, 3, 5, 6, 8, 9
END_OF_IMAGE, IMAGE_TOKEN = TEXT_IDS, TEXT_IDS + 1
END_OF_AUDIO, AUDIO_TOKEN = TEXT_IDS + VISION_IDS, TEXT_IDS + VISION_IDS + 1

SPECIAL = {
    "<pad>": PAD,
    "<eos>": EOS,
    "<bos>": BOS,
    "<unk>": UNK,
    "<start_of_turn>": START_OF_TURN,
    "<end_of_turn>": END_OF_TURN,
    "<start_of_audio>": START_OF_AUDIO,
    "<start_of_image>": START_OF_IMAGE,
    "<end_of_image>": END_OF_IMAGE,
    "<image_soft_token>": IMAGE_TOKEN,
    "<end_of_audio>": END_OF_AUDIO,
    "<audio_soft_token>": AUDIO_TOKEN,
}

# A system message stands before the first turn of the user; there is no turn of its own for it.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set turns = messages -%}
{%- set prefix = '' -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set turns = messages[1:] -%}
    {%- set first = messages[0]['content'] -%}
    {%- set prefix = (first if first is string else first[0]['text']) + '\\n\\n' -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Roles must alternate: user, assistant, user, ...') -}}
    {%- endif -%}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
    {{- prefix if loop.first else '' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] | trim -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'audio' -%}
                {{- '<audio_soft_token>' -}}
            {%- elif part['type'] == 'image' -%}
                {{- '<image_soft_token>' -}}
            {%- elif part['type'] == 'text' -%}
                {{- part['text'] | trim -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer: any text encodes, and decodes to itself."""
    vocabulary = dict(SPECIAL)
    ids = iter(range(10, TEXT_IDS))
    for piece in ["\n", " ", *sorted(set(string.printable) - set(string.whitespace))]:
        vocabulary[piece] = next(ids)
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = next(ids)
    taken = set(vocabulary.values())
    for i in range(TEXT_IDS + VISION_IDS + AUDIO_IDS):
        if i not in taken:
            vocabulary[f"<unused{i}>"] = i
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "audio_token": "<audio_soft_token>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
        },
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )


def write_processor(folder: str | Path, audio_soft_tokens: int = 188) -> None:
    """Writes tokenizer, chat template, feature extractor and image processor, as `Gemma3nProcessor` saves them.

    Args:
        folder: where; made if it is not there.
        audio_soft_tokens: placeholders of a clip, `audio_soft_tokens_per_image` of the model.
    """
    # Gemma3nProcessor needs torchvision, and the tokenizer alone does not.
    from transformers import Gemma3nAudioFeatureExtractor, Gemma3nProcessor, SiglipImageProcessor

    Gemma3nProcessor(
        feature_extractor=Gemma3nAudioFeatureExtractor(),
        image_processor=SiglipImageProcessor(size={"height": 224, "width": 224}),
        tokenizer=make_tokenizer(),
        chat_template=CHAT_TEMPLATE,
        audio_seq_length=audio_soft_tokens,
        image_seq_length=16,
    ).save_pretrained(folder)
