"""Models written by hand, as people write them, with no hint for the compiler."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 96


class Output(NamedTuple):
    """What the language models here return: the loss, and what it was computed from."""

    loss: torch.Tensor
    logits: torch.Tensor


class MLP(nn.Module):
    """Two linears and a mean squared error."""

    def __init__(self, width: int = 32, hidden: int = 64):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x, target):
        return F.mse_loss(self.down(F.gelu(self.up(x))), target)


class Attention(nn.Module):
    """Causal self-attention with q, k, v in one weight, as in nn.MultiheadAttention and nanoGPT."""

    def __init__(self, width: int, heads: int, bias: bool = True):
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(width, 3 * width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        b, s, e = x.shape
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q, k, v = (t.view(b, s, self.heads, e // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(y.transpose(1, 2).reshape(b, s, e))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int, ffn: int, bias: bool = True):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, bias)
        self.up = nn.Linear(width, ffn, bias=bias)
        self.down = nn.Linear(ffn, width, bias=bias)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small GPT with learned positions. ``targets`` stand one to the right already."""

    def __init__(
        self,
        width: int = 32,
        heads: int = 4,
        ffn: int = 64,
        layers: int = 2,
        vocab: int = VOCAB,
        bias: bool = True,
        tied: bool = False,
        max_length: int = 64,
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, heads, ffn, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def hidden(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids, targets):
        logits = self.head(self.hidden(ids))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return Output(loss, logits)


class ShiftedGPT(GPT):
    """The same, with the labels shifted inside the model by slicing the logits."""

    def forward(self, ids, targets):
        logits = self.head(self.hidden(ids))
        shifted, wanted = logits[:, :-1].contiguous(), targets[:, 1:].contiguous()
        loss = F.cross_entropy(shifted.view(-1, shifted.size(-1)), wanted.view(-1))
        return Output(loss, logits)


class TorchAttentionBlock(nn.Module):
    """A block around ``nn.MultiheadAttention`` itself."""

    def __init__(self, width: int, heads: int, ffn: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, ffn), nn.ReLU(), nn.Linear(ffn, width))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        h = self.norm1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class TorchAttentionGPT(GPT):
    """A GPT made of `TorchAttentionBlock`."""

    def __init__(self, width: int = 32, heads: int = 4, ffn: int = 64, layers: int = 2):
        super().__init__(width, heads, ffn, layers=0)
        self.blocks = nn.ModuleList(TorchAttentionBlock(width, heads, ffn) for _ in range(layers))


class RecurrentDepthGPT(GPT):
    """One block, called three times: every weight of it is used thrice."""

    def __init__(self):
        super().__init__(layers=1)

    def hidden(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for _ in range(3):
            x = self.blocks[0](x)
        return self.norm(x)


class TiedAutoencoder(nn.Module):
    """One weight used twice: to encode as it is, to decode transposed."""

    def __init__(self, width: int = 32, hidden: int = 48):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, width) * width**-0.5)
        self.encode_bias = nn.Parameter(torch.randn(hidden) * 0.1)
        self.decode_bias = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x):
        code = torch.relu(F.linear(x, self.weight, self.encode_bias))
        return F.mse_loss(F.linear(code, self.weight.t(), self.decode_bias), x)


class ViT(nn.Module):
    """A vision transformer with a class token: 17 tokens, which two ranks cannot share evenly."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2, classes: int = 10):
        super().__init__()
        self.patch = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.ModuleList(
            EncoderBlock(width, heads, 2 * width, cross=False) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images, labels):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)[:, 0])
        return Output(F.cross_entropy(logits, labels), logits)


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
        )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """A small ResNet for 16 x 16 images."""

    def __init__(self, width: int = 8, classes: int = 10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.layers = nn.Sequential(Residual(width, width, 1), Residual(width, 2 * width, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images, labels):
        logits = self.head(self.pool(self.layers(self.stem(images))).flatten(1))
        return Output(F.cross_entropy(logits, labels), logits)


class CrossAttention(nn.Module):
    """Attention from ``x`` to ``memory``, four separate projections."""

    def __init__(self, width: int, heads: int, causal: bool = False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.o = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, memory):
        q, k, v = (
            part(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part, t in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(y.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    """Self-attention, attention to ``memory`` when ``cross``, and an MLP."""

    def __init__(self, width: int, heads: int, ffn: int, cross: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CrossAttention(width, heads, causal=cross)
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)
        if cross:
            self.norm3, self.cross = nn.LayerNorm(width), CrossAttention(width, heads)

    def forward(self, x, memory=None):
        h = self.norm1(x)
        x = x + self.attn(h, h)
        if memory is not None:
            x = x + self.cross(self.norm3(x), memory)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class EncoderDecoder(nn.Module):
    """A translation model: the two sides have their own lengths and share the token table."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.source_positions = nn.Embedding(64, width)
        self.target_positions = nn.Embedding(64, width)
        self.encoder = nn.ModuleList(
            EncoderBlock(width, heads, 2 * width, cross=False) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            EncoderBlock(width, heads, 2 * width, cross=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, source, target, labels):
        memory = self.tokens(source) + self.source_positions(torch.arange(source.shape[1]))
        for block in self.encoder:
            memory = block(memory)
        x = self.tokens(target) + self.target_positions(torch.arange(target.shape[1]))
        for block in self.decoder:
            x = block(x, memory)
        logits = F.linear(self.norm(x), self.tokens.weight)
        loss = F.cross_entropy(logits.transpose(1, 2), labels)
        return Output(loss, logits)


class NoNormResidual(nn.Module):
    """The residual feeds a column linear and an add, nothing between; row linears have a bias."""

    def __init__(self, width: int = 32, ffn: int = 64, layers: int = 2):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, ffn) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(ffn, width) for _ in range(layers))

    def forward(self, x, target):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return F.mse_loss(x, target)


class QKNormAttention(nn.Module):
    """RMS norm of q and k over all heads together, as in OLMo 2, then attention."""

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.o = nn.Linear(width, width, bias=False)
        for norm in (self.q_norm, self.k_norm):
            nn.init.normal_(norm.weight, mean=1.0, std=0.3)

    def forward(self, x, target):
        q, k, v = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.mse_loss(x + self.o(y.transpose(1, 2).flatten(2)), target)


class InPlace(nn.Module):
    """Adds, activations, writes through a slice and masks, all in place."""

    def __init__(self, width: int = 32, ffn: int = 64):
        super().__init__()
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x, target):
        h = self.up(x)
        h *= 2.0
        h[:, 0] = 0.5
        h.relu_()
        y = self.down(h)
        y += x
        y.mul_(self.scale)
        y.masked_fill_(target < -1.0, 0.0)
        return F.mse_loss(y, target)


class Unused(MLP):
    """Has parameters that no gradient ever reaches."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(32, 64)
        self.detached = nn.Linear(32, 32)

    def forward(self, x, target):
        return super().forward(x, target + self.detached(x).detach())


class TwoHeads(nn.Module):
    """Two outputs with a head each, on a common trunk, and a linear that no gradient reaches."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.trunk, self.left = nn.Linear(width, width), nn.Linear(width, width)
        self.right, self.idle = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        h = torch.tanh(self.trunk(x)) + self.idle(x).detach()
        return {"left": self.left(h), "right": self.right(h)}


class Branching(nn.Module):
    """The second block looks at its data to decide what to do: no graph can hold that."""

    class Gate(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x):
            if x.sum().item() > 0:  # the line that cannot be captured
                return self.linear(x)
            return x

    def __init__(self, width: int = 32):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width), self.Gate(width)])

    def forward(self, x, target):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


class Odd(nn.Module):
    """Nothing here can be cut in two."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x, target):
        return F.mse_loss(self.down(torch.tanh(self.up(x))), target)


def tokens(b: int = 4, s: int = 16, seed: int = 1, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Ids and targets; row r hides its first 3 r targets, so a mean of means would show."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (b, s + 1), generator=g)
    targets = ids[:, 1:].clone()
    for r in range(b):
        targets[r, : min(3 * r, s - 2)] = -100
    return {"ids": ids[:, :-1].contiguous(), "targets": targets}


def vectors(*shape: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Real-valued ``x`` and ``target`` of the same shape."""
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(*shape, generator=g),
        "target": torch.randn(*shape, generator=g),
    }


def images(b: int = 8, seed: int = 1) -> dict[str, torch.Tensor]:
    """16 x 16 pictures of ten classes; each picture has its own brightness."""
    g = torch.Generator().manual_seed(seed)
    pixels = torch.randn(b, 3, 16, 16, generator=g)
    pixels += torch.arange(b).view(b, 1, 1, 1) / b
    return {"images": pixels, "labels": torch.randint(0, 10, (b,), generator=g)}


def translation(b: int = 4, seed: int = 1) -> dict[str, torch.Tensor]:
    """Source of 12 tokens, target of 16, with uneven padding in the labels."""
    aligned = tokens(b, 16, seed)
    g = torch.Generator().manual_seed(seed + 1)
    source = torch.randint(0, VOCAB, (b, 12), generator=g)
    return {"source": source, "target": aligned["ids"], "labels": aligned["targets"]}
