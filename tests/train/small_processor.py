"""A real processor over a tokenizer of a few characters, whose ids are those of `tests.reference`'s models."""

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor

from mlx_gemma3n.processor import Processor

TEMPLATE = """{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}\
{% if p.type == 'audio' %}<audio_soft_token>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<end_of_turn>
{% endfor %}"""


def small_processor(audio_token_id: int, start_id: int, end_id: int, soft_tokens: int, max_samples: int) -> Processor:
    """
    Args:
        audio_token_id, start_id, end_id: of the tokens of a clip.
        soft_tokens: placeholders of a clip.
        max_samples: that a clip may have.
    """
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<start_of_turn>": 4, "<end_of_turn>": 5}
    characters = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?!'-\u00e9"
    vocabulary |= {character: 10 + i for i, character in enumerate(characters)}
    vocabulary |= {"<start_of_audio>": start_id, "<audio_soft_token>": audio_token_id, "<end_of_audio>": end_id}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), "isolated")
    special = [token for token in vocabulary if token.startswith("<")]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens={
            "audio_token": "<audio_soft_token>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
        },
    )
    fast.chat_template = TEMPLATE
    return Processor(
        tokenizer=fast,
        feature_extractor=Gemma3nAudioFeatureExtractor(),
        audio_seq_length=soft_tokens,
        max_samples=max_samples,
        eos_token_ids=(1, 5),
    )
