"""Random attention, over caches and pages, and rotations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.ops.internal.attention import ATTENTION, STACKED_ATTENTION
from penstock.ops.internal.packed import PACKED_ATTENTION
from penstock.ops.internal.pages import BY_DISTANCE, PAGED_ATTENTION
from tests.support.draws import Draw, Source, draws, near, short_name
from tests.support.draws_tables import random_places
from tests.support.error_bounds import Rounded


def _attended(q: Rounded, k: Rounded, v: Rounded, scale: float, bias: Any) -> Rounded:
    scores = (q @ k) * scale
    if bias is not None:
        scores = scores + (bias if isinstance(bias, Rounded) else bias.astype(np.float64))
    return scores.softmax(-1) @ v


@draws("penstock.Attention")
def _attention(rng: Source, name: str) -> Draw:
    lead, rows, keys = rng.dims(2, 6), rng.size(65), rng.pick(rng.size(65), 256, 257, 530)
    width, out = rng.size(33), rng.size(33)
    scale, keys_last = float(rng.pick(1.0, 0.25)), int(rng.chance(0.5))
    q = (rng.normal(size=(*lead, rows, width)) / math.sqrt(width)).astype(np.float32)
    k = rng.normal(size=(*lead, keys, width)).astype(np.float32)
    k = np.ascontiguousarray(k.swapaxes(-1, -2)) if keys_last else k
    v = rng.normal(size=(*lead, keys, out)).astype(np.float32)
    bias = rng.normal(size=rng.broadcast((*lead, rows, keys))).astype(np.float32)
    inputs = [q, k, v, *([bias] if rng.chance(0.5) else [])]

    def bound(draw: Draw) -> list[Rounded | None]:
        q, k, v = (draw.read(i) for i in range(3))
        keys = k if keys_last else k.map(lambda a: a.swapaxes(-1, -2))
        term = draw.inputs[3] if len(draw.inputs) > 3 else None
        return [_attended(q, keys, v, scale, term)]

    return Draw(ATTENTION, inputs, {"scale": scale, "keys_last": keys_last}, bound)


@draws("penstock.PackedAttention")
def _packed_attention(rng: Source, name: str) -> Draw:
    groups, share = rng.integers(1, 3), rng.integers(1, 3)
    width, out = rng.size(33), rng.size(33)
    counts = np.array(
        [rng.pick(0, rng.size(65), rng.size(65), 257) for _ in range(rng.integers(1, 5))]
    )
    starts = rng.integers(0, 3, counts.size)
    before, total = np.cumsum(counts) - counts, int(counts.sum())
    whole, rows = (
        int((starts + counts).max()) + int(rng.integers(0, 3)),
        total + int(rng.pick(0, 7)),
    )
    rows = max(rows, 1)
    scale, keys_last = float(rng.pick(1.0, 0.25)), int(rng.chance(0.5))
    q = (rng.normal(size=(1, groups * share, rows, width)) / math.sqrt(width)).astype(np.float32)
    k = rng.normal(size=(1, groups, rows, width)).astype(np.float32)
    v = rng.normal(size=(1, groups, rows, out)).astype(np.float32)
    dims = counts.size, groups * share, max(whole, 1), max(whole, 1)
    biases = [
        rng.normal(size=rng.broadcast(dims)).astype(np.float32) for _ in range(rng.integers(0, 3))
    ]
    ranges = np.stack((starts, counts, before), 1)
    keys = np.ascontiguousarray(k.swapaxes(-1, -2)) if keys_last else k
    if rng.chance(0.5):  # heads of a row side by side, as dense layers write them
        q, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, v))

    def bound(draw: Draw) -> list[Rounded | None]:
        result = Rounded.exact(np.zeros((*q.shape[:-1], out), np.float32), draw.dtype)
        for i, (start, count, first) in enumerate(ranges.tolist()):
            packed, own = slice(first, first + count), slice(start, start + count)
            terms = [
                np.broadcast_to(b, dims)[i : i + 1, :, own, own].astype(np.float64) for b in biases
            ]
            of_k, of_v = (
                Rounded.exact(np.repeat(x, share, 1)[:, :, packed], draw.dtype) for x in (k, v)
            )
            of_q = Rounded.exact(q[:, :, packed], draw.dtype)
            if count:
                each = _attended(
                    of_q,
                    of_k.map(lambda a: a.swapaxes(-1, -2)),
                    of_v,
                    scale,
                    sum(terms) if terms else None,
                )
                result.value[:, :, packed], result.error[:, :, packed] = each.value, each.error
        return [result]

    attrs = {"scale": scale, "keys_last": keys_last}
    return Draw(PACKED_ATTENTION, [q, keys, v, ranges, *biases], attrs, bound)


@draws("penstock.PagedAttention")
def _paged_attention(rng: Source, name: str) -> Draw:
    groups, share = rng.integers(1, 4), rng.integers(1, 6)
    width, out, positions = rng.size(65), rng.size(65), int(rng.pick(1, 3, 32, 32, 64))
    counts = np.array([rng.pick(0, 1, 1, 2, rng.size(65)) for _ in range(rng.integers(1, 5))])
    adds = rng.chance(0.7)  # new keys and values; else each row sees all positions
    pasts = np.array([rng.pick(1 - adds, rng.size(65), 257, 530) for _ in counts])
    needed = -(-(pasts + adds * counts) // positions)
    begins, first = np.cumsum(needed) - needed, np.cumsum(counts) - counts
    count, rows = int(needed.sum()) + 1, max(int(counts.sum()) + int(rng.pick(0, 3)), 1)
    pages = np.argsort(rng.normal(size=count))[: count - 1].astype(np.int64)
    keys_at = int(rng.pick(0, 5))
    values_at = keys_at + groups * positions * width
    pool = rng.normal(size=(count, values_at + groups * positions * out + 2)).astype(np.float32)
    q = (rng.normal(size=(1, groups * share, rows, width)) / math.sqrt(width)).astype(np.float32)
    k = rng.normal(size=(1, groups, rows, width)).astype(np.float32)
    v = rng.normal(size=(1, groups, rows, out)).astype(np.float32)
    window, scale = int(rng.pick(0, 0, 1, 40)), float(rng.pick(1.0, 0.25))
    runs = np.stack((first, counts, pasts, begins), 1)
    if rng.chance(0.5):  # heads of a row side by side, as dense layers write them
        q, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, v))
    table = rng.normal(size=(groups * share, rng.size(65, 2))).astype(np.float32)
    table[:, -1] *= np.float32(rng.pick(0, 0.03))  # for each position beyond
    attrs = {"scale": scale, "window": window if adds else 0, "positions": positions}
    attrs |= {"keys_at": keys_at, "values_at": values_at}
    inputs = [q, k, v, pool, runs, pages, *([table] if rng.chance(0.5) else [])]
    if not adds:
        inputs, attrs = [q, None, None, *inputs[3:6]], attrs | {"groups": groups, "value_size": out}

    def cache(i: int, at: int, new: np.ndarray) -> np.ndarray:
        size, own = new.shape[3], pages[begins[i] : begins[i] + needed[i]]
        old = pool[own, at : at + groups * positions * size]
        if at == keys_at:
            old = old.reshape(-1, groups, size, positions).swapaxes(2, 3)
        old = old.reshape(-1, groups, positions, size).swapaxes(0, 1).reshape(groups, -1, size)
        added = new[0, :, first[i] : first[i] + adds * counts[i]]
        return np.repeat(np.concatenate((old[:, : pasts[i]], added), 1), share, 0)[None]

    def added(own: np.ndarray, before: np.ndarray, like: Rounded) -> Rounded:
        """What is added to scores of rows at some positions."""
        distance, last = own - before, table.shape[1] - 2
        numbers = like.like(0)
        if len(inputs) > BY_DISTANCE:
            further = like.like(table[:, -1:, None]) * np.maximum(distance - last, 0)
            numbers = like.like(table[:, np.clip(distance, 0, last)]) + further
        hidden = (distance < 0) | ((distance >= window) if window else False)
        if not adds:
            hidden &= False
        value, error = (
            np.where(hidden, x, y) for x, y in ((-1e30, numbers.value), (0, numbers.error))
        )
        return Rounded(value, error, like.dtype)

    def bound(draw: Draw) -> list[Rounded | None]:
        result = Rounded.exact(np.zeros((*q.shape[:-1], out), np.float32), draw.dtype)
        for i, n in enumerate(counts.tolist()):
            own = np.arange(pasts[i], pasts[i] + n)[:, None]
            bias = added(own, np.arange(pasts[i] + adds * n), result)
            of_k, of_v = (
                Rounded.exact(cache(i, at, x), draw.dtype)
                for at, x in ((keys_at, k), (values_at, v))
            )
            some = slice(first[i], first[i] + n)
            if n:
                of_q = Rounded.exact(q[:, :, some], draw.dtype)
                turned = of_k.map(lambda a: a.swapaxes(-1, -2))
                each = _attended(of_q, turned, of_v, scale, bias)
                result.value[:, :, some], result.error[:, :, some] = each.value, each.error
        return [result]

    return Draw(PAGED_ATTENTION, inputs, attrs, bound)


@draws("Attention com.microsoft.GroupQueryAttention penstock.StackedAttention")
def _cached(rng: Source, full_name: str) -> Draw:
    (name, domain), groups, share = short_name(full_name), rng.integers(1, 4), rng.pick(1, 2, 3)
    stacked, domain = name == "StackedAttention", domain if domain != "penstock" else ""
    batch, rows, past, size = rng.pick(1, 2), rng.pick(1, 1, 2, 5), rng.size(65), rng.size(33)
    heads = groups * share
    normal = lambda *dims: rng.normal(size=dims).astype(np.float32)  # noqa: E731
    caches = [normal(batch, groups, past, size) for _ in range(2)]
    total = past + rows
    if domain:
        q = normal(batch, rows, heads * size)
        k, v = (normal(batch, rows, groups * size) for _ in range(2))
        numbers = [np.full((batch, 1), total - 1, np.int32), np.array(total, np.int32)]
        inputs = [q, k, v, *caches, *numbers, None, None]
        attrs: dict[str, Any] = {"num_heads": heads, "kv_num_heads": groups}
    else:
        q = normal(batch, heads, rows, size)
        k, v = (normal(batch, groups, rows, size) for _ in range(2))
        inputs, attrs = [q, k, v, None, *([np.stack(caches)] if stacked else caches)], {}

    def bound(draw: Draw) -> list[Rounded | None]:
        split = lambda a, n: a.reshape(batch, rows, n, size).swapaxes(1, 2)  # noqa: E731
        q, k, v = (x.astype(np.float64) for x in draw.inputs[:3])
        q, k, v = (split(q, heads), split(k, groups), split(v, groups)) if domain else (q, k, v)
        cached = draw.inputs[3:5] if domain else draw.inputs[4] if stacked else draw.inputs[4:6]
        whole = [np.concatenate(pair, 2) for pair in zip(cached, (k, v), strict=True)]
        k, v = (np.repeat(a, share, 1) for a in whole)
        later = np.arange(total) > past + np.arange(rows)[:, None]
        mask = np.where(later & bool(domain), -np.inf, 0.0)
        q, k, v = (Rounded.exact(a, np.dtype("float32")) for a in (q, k.swapaxes(-1, -2), v))
        y = _attended(q, k, v, 1 / math.sqrt(size), mask)
        if domain:
            y = y.map(lambda a: a.swapaxes(1, 2).reshape(batch, rows, -1))
        return [y, None] if stacked else [y, None, None]

    options: dict[str, Any] = {"domain": domain, "version": 1 if domain else 24}
    op = STACKED_ATTENTION if stacked else name
    return Draw(op, inputs, attrs, bound, outputs=3 - stacked, is_formula=True, **options)


@draws("com.microsoft.DecoderMaskedMultiHeadAttention com.microsoft.SparseAttention")
def _buffered(rng: Source, full_name: str) -> Draw:
    name, sparse = short_name(full_name)[0], full_name.endswith("SparseAttention")
    batch, heads, room, size = rng.size(4), rng.size(5), rng.size(65), rng.size(33)
    normal = lambda *dims: rng.normal(size=dims).astype(np.float32)  # noqa: E731
    parts, pasts = ([normal(*dims) for _ in range(n)] for n, dims in (
        (3, (batch, 1, heads * size)), (2, (batch, heads, room, size))))  # fmt: skip
    used, count = rng.integers(room), math.ceil(room / 16)
    seen = np.array([[rng.chance(0.5) or i == j for i in range(count)] for j in range(count)])
    inputs = [*parts, None, None, *pasts, np.array([used], np.int32)]
    attrs, mask = {"num_heads": heads}, None
    if sparse:
        starts, columns = np.append(0, seen.sum(1).cumsum()), np.nonzero(seen)[1]
        codes = [x.astype(np.int32)[None] for x in (starts, columns)]
        ends = [np.full(n, used + 1, np.int32) for n in (1, batch)]
        inputs = [*parts, *pasts, *codes, *ends]
        attrs |= {"kv_num_heads": heads, "sparse_block_size": 16}
        mask = np.where(seen[used // 16, np.arange(used + 1) // 16], 0, -np.inf)

    def bound(draw: Draw) -> list[Rounded | None]:
        q, k, v = (x.astype(np.float64).reshape(batch, heads, 1, size) for x in draw.inputs[:3])
        old = [x[:, :, :used] for x in draw.inputs[3 if sparse else 5 :][:2]]
        k, v = (np.concatenate(pair, 2) for pair in zip(old, (k, v), strict=True))
        q, k, v = (Rounded.exact(a, np.dtype("float32")) for a in (q, k.swapaxes(-1, -2), v))
        y = _attended(q, k, v, 1 / math.sqrt(size), mask)
        return [y.map(lambda a: a.swapaxes(1, 2).reshape(batch, 1, -1)), None, None]

    options: dict[str, Any] = {"domain": "com.microsoft", "version": 1}
    return Draw(name, inputs, attrs, bound, outputs=3, is_formula=True, **options)


@draws("LinearAttention")
def _linear_attention(rng: Source, name: str) -> Draw:
    rule = rng.pick("linear", "gated", "delta", "gated_delta")
    lead, heads, share = (rng.size(3), rng.pick(0, 1, 2, 5)), rng.size(3), rng.size(3)
    size, values = rng.size(33), rng.size(129)
    normal = lambda *dims: rng.normal(size=dims).astype(np.float32)  # noqa: E731
    inputs: list[Any] = [
        normal(*lead, heads * share * size),
        normal(*lead, heads * size) / np.float32(size),
        normal(*lead, heads * values),
        normal(lead[0], heads, size, values) if rng.chance(0.5) else None,
        -abs(normal(*lead, heads * rng.pick(1, size))) if "gated" in rule else None,
        abs(normal(*lead, rng.pick(1, heads))) if "delta" in rule else None,
    ]
    attrs = {"q_num_heads": heads * share, "kv_num_heads": heads, "update_rule": rule}
    attrs |= {"scale": 0.5} if rng.chance(0.5) else {}

    def bound(draw: Draw) -> list[Rounded | None]:
        zeros = np.zeros((lead[0], heads, size, values))
        state = Rounded.exact(zeros, draw.dtype) if inputs[3] is None else draw.read(3)
        apart = lambda i, *dims: draw.read(i).map(lambda x: x.reshape(*lead, heads, *dims))  # noqa: E731
        q, k, v = apart(0, share, size), apart(1, 1, size), apart(2, 1, values)
        turned = lambda x: x.map(lambda y: y.swapaxes(-1, -2))  # noqa: E731
        scale = attrs.get("scale", 1 / math.sqrt(size))
        results: list[Rounded] = []
        for t in range(lead[1]):
            key, added = k[:, t], v[:, t]
            if inputs[4] is not None:
                state = state * apart(4, -1, 1)[:, t].exp()
            if inputs[5] is not None:
                rate = draw.read(5)[:, t].map(lambda x: x[..., None, None])
                added = (added - key @ state) * rate
            state = state + turned(key) * added
            results.append(q[:, t] @ state * near(state, scale))
        if not results:
            return [None, state]
        joined = [np.stack([getattr(y, x) for y in results], 1) for x in ("value", "error")]
        y = Rounded(*[x.reshape(*lead, -1) for x in joined], draw.dtype)
        return [y, state]

    return Draw(name, inputs, attrs, bound, outputs=2, version=27, is_formula=True)


@draws("CausalConvWithState")
def _causal(rng: Source, name: str) -> Draw:
    (n, channels), length, kernel = rng.dims(2, 300), rng.pick(1, rng.size(161)), rng.integers(1, 7)
    dims, shapes = (n, channels, length), [(channels, 1, kernel), (channels,)]
    x, w, bias = (rng.numbers(shape, "float32") for shape in (dims, *shapes))
    past = rng.numbers((n, channels, kernel - 1), "float32") if rng.chance(0.7) else None
    attrs = {"activation": rng.pick("none", "silu")}

    def bound(draw: Draw) -> list[Rounded | None]:
        before = np.zeros((n, channels, kernel - 1), np.float32) if past is None else past
        rows = np.concatenate([before, x], -1)
        seen = np.lib.stride_tricks.sliding_window_view(rows, kernel, -1)
        one = np.ones((*dims, 1)) * (0 if draw.inputs[2] is None else bias[:, None, None])
        # The bias is among the terms of a sum.
        terms = Rounded.exact(np.concatenate([seen, one], -1), draw.dtype)
        y = (terms * np.concatenate([w, np.ones((channels, 1, 1))], -1)).sum(-1)
        return [y if attrs["activation"] == "none" else y * y.sigmoid(), None]

    inputs = [x, w, bias if rng.chance(0.7) else None, past]
    return Draw(name, inputs, attrs, bound, outputs=2, version=27, is_formula=True)


@draws("com.microsoft.GatherBlockQuantized")
def _gathered_blocks(rng: Source, full_name: str) -> Draw:
    (name, domain), bits, block = short_name(full_name), rng.pick(2, 4, 4, 8), rng.pick(16, 32, 128)
    lead, nbytes = rng.dims(rng.pick(1, 2), 60), rng.size(129)
    blocks = -(-nbytes * 8 // bits // block)
    codes = rng.integers(0, 256, (*lead, nbytes)).astype(np.uint8)
    zeros = rng.integers(0, 256, (*lead, -(-blocks * bits // 8))).astype(np.uint8)
    scales = rng.numbers((*lead, blocks), "float32")
    dims, dtype = rng.dims(rng.integers(3), 40), rng.pick("int32", "int64")
    indices = rng.integers(-lead[0] - 1, lead[0] + 1, dims).astype(dtype)
    inputs = [codes, indices, scales, *([zeros] if rng.chance(0.5) else [])]
    attrs = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": len(lead)}
    return Draw(name, inputs, attrs, domain=domain, version=1)


@draws("RotaryEmbedding com.microsoft.RotaryEmbedding")
def _rotary(rng: Source, full_name: str) -> Draw:
    (name, domain), half = short_name(full_name), rng.size(17)
    batch, heads, sequence, rest = rng.size(3), rng.size(5), rng.size(17), 2 * rng.integers(3)
    size = 2 * half + rest
    x = rng.numbers((batch, heads, sequence, size), "float32")
    cos, sin = (rng.numbers((24, half), "float32") for _ in range(2))
    ids = random_places(rng, (batch, sequence), 24).astype(np.int64) % 25
    attrs = {"interleaved": int(rng.chance(0.5)), "rotary_embedding_dim": 2 * half}
    attrs["num_heads"] = heads
    inputs = [x, ids, cos, sin] if domain else [x, cos, sin, ids]
    return Draw(name, inputs, attrs, domain=domain, version=1 if domain else 26)
