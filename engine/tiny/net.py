"""The training-time network: a minimal Qwen3 decoder whose parameters carry the Hugging Face names.

It computes the same function as transformers' `Qwen3ForCausalLM` (checked by a test), but casts its matrices
to one compute dtype, takes rows packed with whole documents whose branches share a beginning, and runs the
output head only where there is a loss. That is what makes training on two CPU cores bearable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class NetConfig:
    """The shape of the network, in the words of a Hugging Face config."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


class RMSNorm(nn.Module):
    """The weight of a root-mean-square norm."""

    def __init__(self, size: int, init: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), init))


class Linear(nn.Linear):
    """The weight of a linear map without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)


def rope_tables(positions: Tensor, config: NetConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape [*positions, head_dim] (halves repeated, as in transformers)."""
    step = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32) / config.head_dim
    angles = positions.float().unsqueeze(-1) * config.rope_theta**-step
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to [heads, length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


BLOCK = 192  # queries
EDGE = 32  # keys begin and end at multiples of this: kernels are prepared anew for every shape


@dataclass(frozen=True)
class Span:
    """A block of queries and the keys they see: a document's shared beginning, and what leads up to them.

    `shared` and `own`: ranges of keys, the first empty where the second holds it all;
    `hidden` [queries, keys]: which of those keys a query does not see.
    """

    queries: slice
    shared: slice
    own: slice
    hidden: Tensor

    def keys_of(self, x: Tensor) -> Tensor:
        """The rows [heads, keys, size] of `x` [heads, length, size] that this block sees."""
        if self.shared.stop == self.shared.start:
            return x[:, self.own]
        return torch.cat((x[:, self.shared], x[:, self.own]), 1)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add rows laid out as those of `keys_of` to where they came from."""
        count = self.shared.stop - self.shared.start
        total[:, self.shared] += part[:, :count]
        total[:, self.own] += part[:, count:]


@dataclass(frozen=True)
class Layout:
    """Which tokens of a row [length] belong together.

    A row holds several documents one after the other. A document may branch: tokens of branch 0 are seen by
    all that come after them, those of another branch by that branch alone, as if each branch were a document
    of its own that repeats the shared beginning. `positions` are what the rotary embedding is told.
    """

    documents: Tensor
    branches: Tensor
    positions: Tensor

    @classmethod
    def plain(cls, length: int, device: torch.device) -> Layout:
        """One document without branches."""
        zeros = torch.zeros(length, dtype=torch.long, device=device)
        return cls(zeros, zeros, torch.arange(length, device=device))

    def to(self, device: torch.device) -> Layout:
        return Layout(*(each.to(device) for each in (self.documents, self.branches, self.positions)))

    def hidden(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[queries, keys]: whether the key at one index is hidden from the query at another."""
        same = self.documents[queries][:, None] == self.documents[keys][None]
        branch = self.branches[keys][None]
        same &= (branch == 0) | (branch == self.branches[queries][:, None])
        return ~(same & (keys[None] <= queries[:, None]))

    def spans(self) -> list[Span]:
        """The row in blocks of queries."""
        length = len(self.documents)
        out = []
        for begin in range(0, length, BLOCK):
            end = min(begin + BLOCK, length)
            document, branch = int(self.documents[begin]), int(self.branches[begin])
            inside = self.documents == document
            start = int(inside.nonzero()[0])
            shared, own = slice(0, 0), start // EDGE * EDGE
            if branch:
                after = int((inside & (self.branches == branch)).nonzero()[0]) // EDGE * EDGE
                until = -(-int((inside & (self.branches == 0)).nonzero()[-1] + 1) // EDGE) * EDGE
                if until < after:
                    shared, own = slice(own, until), after
            keys = torch.cat((torch.arange(shared.start, shared.stop), torch.arange(own, end)))
            hidden = self.hidden(torch.arange(begin, end), keys)
            out.append(Span(slice(begin, end), shared, slice(own, end), hidden))
        return out


class BranchedAttention(torch.autograd.Function):
    """Attention of grouped queries over a row, a block of queries at a time, as five products a block.

    Queries [shared heads, group, length, size]; keys and values [shared heads, length, size]. On a CPU with
    bf16 products it takes a quarter of the time of torch's own, whose backward pass computes in float32 and
    which would go through what a block does not see.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, spans: list[Span]) -> Tensor:
        shared, group, _, size = queries.shape
        queries = queries * size**-0.5
        out, weights = torch.empty_like(queries), []
        for span in spans:
            # The queries of heads that share keys are rows of one product.
            q = queries[:, :, span.queries].flatten(1, 2)
            scores = torch.bmm(q, span.keys_of(keys).mT)
            scores.view(shared, group, *span.hidden.shape).masked_fill_(span.hidden, float("-inf"))
            weights.append(torch.softmax(scores, -1))
            mixed = torch.bmm(weights[-1], span.keys_of(values))
            out[:, :, span.queries] = mixed.view(shared, group, -1, size)
        ctx.save_for_backward(queries, keys, values, *weights)
        ctx.spans = spans
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        queries, keys, values, *weights = ctx.saved_tensors
        (gradient,) = gradients
        shared, group, _, size = queries.shape
        d_q = torch.empty_like(queries)
        # Sums over blocks, in float32 at least.
        wide = torch.promote_types(keys.dtype, torch.float32)
        d_k, d_v = (torch.zeros_like(keys, dtype=wide) for _ in range(2))
        for span, weight in zip(ctx.spans, weights, strict=True):
            q = queries[:, :, span.queries].flatten(1, 2)
            above = gradient[:, :, span.queries].flatten(1, 2)
            span.add(d_v, torch.bmm(weight.mT, above))
            d_weight = torch.bmm(above, span.keys_of(values).mT)
            d_scores = torch.ops.aten._softmax_backward_data(d_weight, weight, -1, weight.dtype)
            d_q[:, :, span.queries] = torch.bmm(d_scores, span.keys_of(keys)).view(shared, group, -1, size)
            span.add(d_k, torch.bmm(d_scores.mT, q))
        return d_q * size**-0.5, d_k.to(keys.dtype), d_v.to(values.dtype), None


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm, computed in float32 as Qwen3 does."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def heads_of(
    x: Tensor, weights: Sequence[Tensor], norms: Sequence[Tensor], turn: tuple[Tensor, Tensor], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What attention takes, from the states [length, hidden] before a layer.

    weights: of queries, keys and values; norms: before them, of queries and of keys; turn: `rope_tables`.
    """
    x = norm(x, norms[0], eps)
    size, length = norms[1].shape[0], x.shape[0]
    q, k, v = (F.linear(x, weight.to(x.dtype)).view(length, -1, size).transpose(0, 1) for weight in weights)
    q, k = rotate(norm(q, norms[1], eps), *turn), rotate(norm(k, norms[2], eps), *turn)
    return q.reshape(k.shape[0], -1, length, size), k.contiguous(), v.contiguous()


def after_attention(x: Tensor, mixed: Tensor, weights: Sequence[Tensor], scale: Tensor, eps: float) -> Tensor:
    """The states after a layer, from those before it and what attention gave.

    mixed: [shared heads, group, length, size]; weights: of the output, and of the feed-forward block (gate,
    up, down); scale: of the norm between them.
    """
    out, gate, up, down = (weight.to(x.dtype) for weight in weights)
    x = x + F.linear(mixed.flatten(0, 1).transpose(0, 1).flatten(1), out)
    inner = norm(x, scale, eps)
    return x + F.linear(F.silu(F.linear(inner, gate)) * F.linear(inner, up), down)


class Attention(nn.Module):
    """The weights of grouped-query attention with normed queries and keys."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        queries = config.num_attention_heads * config.head_dim
        shared = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, queries)
        self.k_proj = Linear(config.hidden_size, shared)
        self.v_proj = Linear(config.hidden_size, shared)
        self.o_proj = Linear(queries, config.hidden_size)
        # Above one from the start: with normed queries and keys this is what lets a head look at one token.
        self.q_norm = RMSNorm(config.head_dim, init=1.5)
        self.k_norm = RMSNorm(config.head_dim, init=1.5)


class MLP(nn.Module):
    """The weights of the gated feed-forward block."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)


class Layer(nn.Module):
    """One pre-norm decoder layer. before, after: `heads_of` and `after_attention`, compiled or not."""

    def __init__(self, config: NetConfig, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        super().__init__()
        self.eps, self.before, self.after = config.rms_norm_eps, before, after
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], seen: list[Span] | Tensor) -> Tensor:
        a, m = self.self_attn, self.mlp
        projections = (a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)
        norms = (self.input_layernorm.weight, a.q_norm.weight, a.k_norm.weight)
        q, k, v = self.before(x, projections, norms, turn, self.eps)
        if isinstance(seen, Tensor):
            each = F.scaled_dot_product_attention(q, k[:, None], v[:, None], attn_mask=seen)
        else:
            each = BranchedAttention.apply(q, k, v, seen)  # type: ignore[no-untyped-call]
        rest = (a.o_proj.weight, m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight)
        out: Tensor = self.after(x, each, rest, self.post_attention_layernorm.weight, self.eps)
        return out


class Decoder(nn.Module):
    """Embedding, layers and final norm: what transformers calls `model`."""

    def __init__(self, config: NetConfig, compiled: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        # Compiled once, for all layers.
        parts = (
            (torch.compile(heads_of), torch.compile(after_attention))
            if compiled
            else (heads_of, after_attention)
        )
        self.layers = nn.ModuleList(Layer(config, *parts) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size)


class Net(nn.Module):
    """The whole network; its `state_dict` loads into `Qwen3ForCausalLM` (tied embeddings).

    compiled: by a C++ compiler, what a layer computes beside attention; rows should then all have one length.
    """

    def __init__(self, config: NetConfig, compiled: bool = False) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, compiled)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.05)
        for name, weight in self.named_parameters():
            if name.endswith("_proj.weight"):
                nn.init.orthogonal_(weight, gain=0.1 if "o_proj" in name or "down_proj" in name else 1.0)
        self._look_back()

    @torch.no_grad()
    def _look_back(self) -> None:
        """Start two heads of the first layer looking one and two tokens back.

        Copying needs heads that know what came before a token; left to chance a small model finds them late.
        All embeddings share a constant in one channel, and the queries and keys of these heads read only that
        channel: with the rotary embedding their scores then depend on distance alone.
        """
        parameters = dict(self.named_parameters())
        keys = parameters["model.layers.0.self_attn.k_proj.weight"]
        queries = parameters["model.layers.0.self_attn.q_proj.weight"]
        size, fast = self.config.head_dim, 5
        half = size // 2
        self.model.embed_tokens.weight[:, 0] = 0.4
        angles = self.config.rope_theta ** -(torch.arange(half).float() * 2 / size)
        keys[:size] = 0
        keys[:fast, 0] = 1
        for head in range(self.config.num_attention_heads // self.config.num_key_value_heads):
            first, back = head * size, angles[:fast] * (head + 1)
            queries[first : first + size] = 0
            queries[first : first + fast, 0] = torch.cos(back)
            queries[first + half : first + half + fast, 0] = -torch.sin(back)

    def states(self, ids: Tensor, dtype: torch.dtype, layout: Layout | None = None) -> Tensor:
        """Final normed states [length, hidden] of a row of tokens: one document, or what its layout says."""
        layout = layout or Layout.plain(len(ids), ids.device)
        if ids.device.type == "cpu":
            seen: list[Span] | Tensor = layout.spans()
        else:
            every = torch.arange(len(ids), device=ids.device)
            seen = ~layout.hidden(every, every)
        cos, sin = rope_tables(layout.positions, self.config)
        turn = (cos.to(dtype), sin.to(dtype))
        x = self.model.embed_tokens(ids).to(dtype)
        for layer in self.model.layers:
            x = layer(x, turn, seen)
        return norm(x, self.model.norm.weight, self.config.rms_norm_eps)

    def logits(self, states: Tensor) -> Tensor:
        """Output scores through the tied embedding."""
        return F.linear(states, self.model.embed_tokens.weight.to(states.dtype)).float()
