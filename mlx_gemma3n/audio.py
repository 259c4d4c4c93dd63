"""The USM conformer encoder (arXiv:2303.01037): log-mel frames in, audio encodings out, in the order data meets them.

Follows transformers' `Gemma3nAudioEncoder`. Attention is local: each chunk of queries sees its own context of keys, so
memory grows with the length of a clip, not with its square. The depthwise convolution is a sum of shifted products, not
`mx.conv1d` with a group for each channel. Measured on one CPU core, four clips of 30 s at the width of E2B: 48 against
74 ms forward, 197 against 356 ms with the gradient; its price is 317 against 282 MB at the peak of the gradient.
"""

import math

import mlx.core as mx
import mlx.nn as nn

from mlx_gemma3n.config import AudioConfig

# transformers gives these norms no eps of the config's.
NORM_EPS = 1e-6


def time_stride(config: AudioConfig) -> int:
    """The number of log-mel frames to one frame of the conformer."""
    return math.prod(time for time, _ in config.sscp_conv_stride_size)


def encoded_length(config: AudioConfig, frames: int) -> int:
    """The number of encodings that `frames` log-mel frames become: one for each stride and reduction, rounded up."""
    return -(-frames // (time_stride(config) * config.conf_reduction_factor))


class CumulativeGroupNorm(nn.Module):
    """Normalises each frame by mean and variance of all frames up to it (`Gemma3nAudioCumulativeGroupNorm`).

    The squared differences of each frame are from its own cumulative mean, as in the reference.
    """

    def __init__(self, channels: int, eps: float):
        super().__init__()
        self.weight = mx.ones((channels,))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """`[clips, frames, bins, channels]` -> the same shape."""
        y = x.astype(mx.float32)
        count = mx.arange(1, y.shape[1] + 1)[None, :, None, None] * float(y.shape[2] * y.shape[3])
        mean = mx.cumsum(y.sum(axis=(2, 3), keepdims=True), axis=1) / count
        centred = y - mean
        variance = mx.cumsum((centred * centred).sum(axis=(2, 3), keepdims=True), axis=1) / count
        return (centred * mx.rsqrt(variance + self.eps) * self.weight.astype(mx.float32)).astype(x.dtype)


class SSCPConvBlock(nn.Module):
    """One strided convolution over time and mel bins, its norm and ReLU (`Gemma3nAudioSSCPConvBlock`)."""

    def __init__(self, config: AudioConfig, idx: int):
        super().__init__()
        channels = config.sscp_conv_channel_size
        self.kernel = config.sscp_conv_kernel_size[idx]
        self.conv = nn.Conv2d(
            1 if idx == 0 else channels[idx - 1],
            channels[idx],
            self.kernel,
            stride=config.sscp_conv_stride_size[idx],
            bias=False,
        )
        self.norm = CumulativeGroupNorm(channels[idx], config.sscp_conv_group_norm_eps)

    def __call__(self, x: mx.array) -> mx.array:
        """`[clips, frames, bins, channels]`, time padded at its end only, bins by one on either side."""
        x = mx.pad(x, [(0, 0), (0, self.kernel[0] - 1), (1, 1), (0, 0)])
        return nn.relu(self.norm(self.conv(x)))


class SubSampleConvProjection(nn.Module):
    """Two convolutions, a quarter of the frames, and the projection (`Gemma3nAudioSubSampleConvProjection`)."""

    def __init__(self, config: AudioConfig):
        super().__init__()
        self.conv_0 = SSCPConvBlock(config, 0)
        self.conv_1 = SSCPConvBlock(config, 1)
        bins = config.input_feat_size
        for (_, kernel), (_, stride) in zip(config.sscp_conv_kernel_size, config.sscp_conv_stride_size):
            bins = (bins + 2 - kernel) // stride + 1
        self.input_proj_linear = nn.Linear(bins * config.sscp_conv_channel_size[-1], config.hidden_size, bias=False)

    def __call__(self, input_features: mx.array) -> mx.array:
        """`[clips, frames, mel_bins]` -> `[clips, frames / 4, hidden]`."""
        x = self.conv_1(self.conv_0(input_features[..., None].astype(self.conv_0.conv.weight.dtype)))
        return self.input_proj_linear(x.reshape(*x.shape[:2], -1))


class RelativePositionEmbedding(nn.Module):
    """Logits of queries against keys and against their distance (Transformer-XL, arXiv:1901.02860;
    `Gemma3nAudioRelativePositionEmbedding`)."""

    def __init__(self, config: AudioConfig):
        super().__init__()
        self.num_heads = config.conf_num_attention_heads
        self.channels = config.hidden_size
        self.past = max(0, config.conf_attention_context_left - 1)
        self.future = config.conf_attention_context_right
        self.pos_proj = nn.Linear(self.channels, self.channels, bias=False)

    def _distances(self, dtype: mx.Dtype) -> mx.array:
        """Sinusoids of the distances from `past` down to `-future`, `[distances, channels]`."""
        half = self.channels // 2
        inverse = mx.exp(mx.arange(half) * -(math.log(1e4) / max(half - 1, 1)))
        time = mx.arange(self.past, -self.future - 1, -1)[:, None].astype(mx.float32) * inverse
        return mx.concatenate([mx.sin(time), mx.cos(time)], axis=-1).astype(dtype)

    def __call__(self, queries: mx.array, keys: mx.array) -> mx.array:
        """
        Args:
            queries: `[clips, heads, chunks, chunk, head_dim]`.
            keys: `[clips, heads, chunks, context, head_dim]`.

        Returns:
            `[clips, heads, chunks, chunk, context]`.
        """
        clips, heads, chunks, chunk, head_dim = queries.shape
        context = keys.shape[3]
        content = queries @ keys.swapaxes(-1, -2)

        distances = self.pos_proj(self._distances(queries.dtype))
        count = distances.shape[0]
        distances = distances.reshape(count, heads, head_dim).transpose(1, 2, 0)
        position = queries.reshape(clips, heads, chunks * chunk, head_dim) @ distances
        # Row w moves right by w: padded to context + 1 and read again at width context.
        position = position.reshape(clips, heads, chunks, chunk, count)
        position = mx.pad(position, [(0, 0)] * 4 + [(0, context + 1 - count)])
        position = position.reshape(clips, heads, chunks, -1)[..., : chunk * context]
        return content + position.reshape(content.shape)


class AudioAttention(nn.Module):
    """Chunked local attention with capped logits (`Gemma3nAudioAttention`)."""

    def __init__(self, config: AudioConfig):
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.head_dim = config.conf_num_attention_heads, size // config.conf_num_attention_heads
        self.chunk, self.cap = config.conf_attention_chunk_size, config.conf_attention_logit_cap
        self.past = max(0, config.conf_attention_context_left - 1)
        self.future = config.conf_attention_context_right
        self.relative_position_embedding = RelativePositionEmbedding(config)
        self.per_dim_scale = mx.zeros((self.head_dim,))
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)

    def __call__(self, x: mx.array, padding: mx.array) -> mx.array:
        """
        Args:
            x: `[clips, frames, hidden]`.
            padding: bool `[clips, frames]`, True on padding.

        Returns:
            `[clips, frames, hidden]`.
        """
        clips, frames, _ = x.shape
        chunks = -(-frames // self.chunk)
        context = self.chunk + self.past + self.future
        split = (clips, -1, self.num_heads, self.head_dim)

        # softplus(0) = log 2: the scale is 1/sqrt(head_dim) where per_dim_scale is zero.
        scale = nn.softplus(self.per_dim_scale) * (self.head_dim**-0.5 / math.log(2.0))
        queries = self.q_proj(x).reshape(split) * scale
        queries = mx.pad(queries, [(0, 0), (0, chunks * self.chunk - frames), (0, 0), (0, 0)])
        queries = queries.reshape(clips, chunks, self.chunk, self.num_heads, self.head_dim).transpose(0, 3, 1, 2, 4)

        # Chunk u sees frames [u * chunk - past, u * chunk - past + context).
        where = mx.arange(chunks)[:, None] * self.chunk + mx.arange(context)
        ends = (self.past, self.future + self.chunk - 1)

        def contexts(y: mx.array) -> mx.array:
            """`[clips, frames, ...]` -> `[clips, chunks, context, ...]`"""
            return mx.pad(y, [(0, 0), ends] + [(0, 0)] * (y.ndim - 2))[:, where]

        keys = contexts(self.k_proj(x).reshape(split)).transpose(0, 3, 1, 2, 4)
        values = contexts(self.v_proj(x).reshape(split)).transpose(0, 3, 1, 2, 4)

        query, key = mx.arange(self.chunk)[:, None], mx.arange(context)
        local = (key >= query) & (key <= query + self.past + self.future)
        seen = contexts(~padding)[:, None, :, None] & local

        logits = self.relative_position_embedding(queries, keys)
        logits = mx.tanh(logits / self.cap) * self.cap
        logits = mx.where(seen, logits, mx.finfo(logits.dtype).min)
        probabilities = mx.softmax(logits, axis=-1, precise=True)
        out = (probabilities @ values).transpose(0, 2, 3, 1, 4)
        return out.reshape(clips, chunks * self.chunk, -1)[:, :frames]


class ConformerAttention(nn.Module):
    """`Gemma3nAudioConformerAttention`"""

    def __init__(self, config: AudioConfig):
        super().__init__()
        size, self.limit = config.hidden_size, config.gradient_clipping
        self.pre_attn_norm = nn.RMSNorm(size, eps=NORM_EPS)
        self.attn = AudioAttention(config)
        self.post = nn.Linear(size, size, bias=False)
        self.post_norm = nn.RMSNorm(size, eps=NORM_EPS)

    def __call__(self, x: mx.array, padding: mx.array) -> mx.array:
        y = self.attn(self.pre_attn_norm(mx.clip(x, -self.limit, self.limit)), padding)
        return x + self.post_norm(mx.clip(self.post(y), -self.limit, self.limit))


class ConformerFeedForward(nn.Module):
    """`Gemma3nAudioConformerFeedForward`"""

    def __init__(self, config: AudioConfig):
        super().__init__()
        size, self.limit = config.hidden_size, config.gradient_clipping
        self.residual_weight = config.conf_residual_weight
        self.pre_layer_norm = nn.RMSNorm(size, eps=NORM_EPS)
        self.ffw_layer_1 = nn.Linear(size, size * 4, bias=False)
        self.ffw_layer_2 = nn.Linear(size * 4, size, bias=False)
        self.post_layer_norm = nn.RMSNorm(size, eps=NORM_EPS)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.pre_layer_norm(mx.clip(x, -self.limit, self.limit))
        y = mx.clip(self.ffw_layer_2(nn.silu(self.ffw_layer_1(y))), -self.limit, self.limit)
        return x + self.post_layer_norm(y) * self.residual_weight


class DepthwiseConv1d(nn.Module):
    """A causal convolution of each channel by itself."""

    def __init__(self, channels: int, kernel: int):
        super().__init__()
        bound = kernel**-0.5
        self.weight = mx.random.uniform(-bound, bound, (channels, kernel, 1))

    def __call__(self, x: mx.array) -> mx.array:
        """`[clips, frames, channels]` -> the same shape."""
        _, frames, _ = x.shape
        kernel = self.weight.shape[1]
        x = mx.pad(x, [(0, 0), (kernel - 1, 0), (0, 0)])
        return sum(x[:, i : i + frames] * self.weight[:, i, 0] for i in range(kernel))


class ConformerLightConv1d(nn.Module):
    """`Gemma3nAudioConformerLightConv1d`"""

    def __init__(self, config: AudioConfig):
        super().__init__()
        size, self.limit = config.hidden_size, config.gradient_clipping
        self.pre_layer_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.linear_start = nn.Linear(size, size * 2, bias=False)
        self.depthwise_conv1d = DepthwiseConv1d(size, config.conf_conv_kernel_size)
        self.conv_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.linear_end = nn.Linear(size, size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.depthwise_conv1d(nn.glu(self.linear_start(self.pre_layer_norm(x))))
        y = self.conv_norm(mx.clip(y, -self.limit, self.limit))
        return x + self.linear_end(nn.silu(y))


class ConformerBlock(nn.Module):
    """`Gemma3nAudioConformerBlock`"""

    def __init__(self, config: AudioConfig):
        super().__init__()
        self.limit = config.gradient_clipping
        self.ffw_layer_start = ConformerFeedForward(config)
        self.attention = ConformerAttention(config)
        self.lconv1d = ConformerLightConv1d(config)
        self.ffw_layer_end = ConformerFeedForward(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=NORM_EPS)

    def __call__(self, x: mx.array, padding: mx.array) -> mx.array:
        x = self.attention(self.ffw_layer_start(x), padding)
        x = self.lconv1d(mx.where(padding[..., None], mx.array(0, x.dtype), x))
        x = self.ffw_layer_end(x)
        return self.norm(mx.clip(x, -self.limit, self.limit))


class AudioEncoder(nn.Module):
    """The audio tower (`Gemma3nAudioEncoder`)."""

    def __init__(self, config: AudioConfig):
        super().__init__()
        self.config = config
        self.subsample_conv_projection = SubSampleConvProjection(config)
        self.conformer = [ConformerBlock(config) for _ in range(config.conf_num_hidden_layers)]

    def __call__(self, input_features: mx.array, padding: mx.array) -> tuple[mx.array, mx.array]:
        """
        Args:
            input_features: log-mel `[clips, frames, mel_bins]`.
            padding: bool `[clips, frames]`, True on padding.

        Returns:
            Encodings `[clips, encoded_length(frames), hidden]`, zero on padding, and their padding mask.

        Raises:
            ValueError: there are no clips or no frames, or the mask is of another length.
        """
        if 0 in padding.shape or padding.shape != input_features.shape[:2]:
            raise ValueError(f"features of shape {input_features.shape} with a padding mask of shape {padding.shape}")
        x, padding = self.subsample(input_features, padding)
        for block in self.conformer:
            x = block(x, padding)
        return self.reduce(x, padding)

    def subsample(self, input_features: mx.array, padding: mx.array) -> tuple[mx.array, mx.array]:
        """Log-mel frames and their padding to those of the conformer, `[clips, frames / 4, hidden]`."""
        return self.subsample_conv_projection(input_features), self.frame_padding(padding)

    def frame_padding(self, padding: mx.array) -> mx.array:
        """Padding of log-mel frames to that of the conformer's frames, `[clips, frames / 4]`."""
        # Time is padded at its end alone, so a frame of the conformer starts where its first log-mel frame does.
        return padding[:, :: time_stride(self.config)]

    def reduce(self, x: mx.array, padding: mx.array) -> tuple[mx.array, mx.array]:
        """Every `conf_reduction_factor`-th frame of the conformer's output, zero on padding."""
        every = self.config.conf_reduction_factor
        x, padding = x[:, ::every], padding[:, ::every]
        return mx.where(padding[..., None], mx.array(0, x.dtype), x), padding
