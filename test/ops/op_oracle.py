"""Float64 (or plain integer) loops for every operator, written from the definitions.

They share no code with the references they judge: one row, head and slot at a time.
"""

import math

import torch


def row(pool, t):
    """Row `t` of a pool [N, Hkv, d] or [pages, P, Hkv, d], float64 [Hkv, d]."""
    if pool.dim() == 3:
        return pool[t].double()
    return pool[t // pool.size(1), t % pool.size(1)].double()


def window_index(req_to_token, req_rows, seq_lens, window):
    rows = torch.zeros(len(req_rows), window, dtype=torch.int32)
    lens = torch.zeros(len(req_rows), dtype=torch.int32)
    for b, (request, length) in enumerate(zip(req_rows.tolist(), seq_lens.tolist(), strict=True)):
        positions = range(max(0, length - window), length)
        lens[b] = len(positions)
        for column, position in enumerate(positions):
            rows[b, column] = req_to_token[request, position]
    return rows, lens


def window_index_paged(kv_indptr, kv_indices, kv_last_page_len, page_size, window):
    batch = len(kv_last_page_len)
    rows = torch.zeros(batch, window, dtype=torch.int32)
    lens = torch.zeros(batch, dtype=torch.int32)
    for b in range(batch):
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].tolist()
        every = [page * page_size + offset for page in pages for offset in range(page_size)]
        unused = page_size - int(kv_last_page_len[b]) if pages else 0
        last = every[: len(every) - unused][-window:]
        lens[b] = len(last)
        rows[b, : len(last)] = torch.tensor(last, dtype=torch.int32)
    return rows, lens


def window_gather(key_pools, value_pools, rows, lens, seq_lens, out_key, out_value):
    window = rows.size(1)
    for layer, (keys, values) in enumerate(zip(key_pools, value_pools, strict=True)):
        for b in range(len(lens)):
            for column in range(int(lens[b])):
                position = int(seq_lens[b]) - int(lens[b]) + column
                t = int(rows[b, column])
                out_key[layer, b, position % window] = row(keys, t).to(out_key.dtype)
                out_value[layer, b, position % window] = row(values, t).to(out_value.dtype)


def summary(queries, keys, values, scale):
    """Whole-set summary of one layer: queries [Hq, R, d], keys and values lists of [Hkv, d]."""
    heads, slots, dim = queries.shape
    value = torch.zeros(heads, slots, dim, dtype=torch.float64)
    lse = torch.full((heads, slots), -math.inf, dtype=torch.float64)
    if not keys:
        return value, lse
    key, rows = torch.stack(keys), torch.stack(values)  # [n, Hkv, d]
    group = heads // key.size(1)
    for head in range(heads):
        for slot in range(slots):
            score = scale * (key[:, head // group] @ queries[head, slot].double())
            lse[head, slot] = torch.logsumexp(score, 0)
            value[head, slot] = torch.softmax(score, 0) @ rows[:, head // group]
    return value, lse


def merge(value_a, lse_a, value_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.where(lse.isinf(), 0.0, (lse_a - lse).exp())
    weight_b = torch.where(lse.isinf(), 0.0, (lse_b - lse).exp())
    return weight_a[..., None] * value_a + weight_b[..., None] * value_b, lse


def summary_merge(queries, key_pools, value_pools, row_lists, state_value, state_lse, slots, scale):
    """New float64 (state_value, state_lse); row_lists holds each request's row ids."""
    new_value, new_lse = state_value.double(), state_lse.double()
    for slot, ids in zip(slots.tolist(), row_lists, strict=True):
        if not ids:
            continue
        for layer, (keys, values) in enumerate(zip(key_pools, value_pools, strict=True)):
            part = summary(
                queries[layer], [row(keys, t) for t in ids], [row(values, t) for t in ids], scale
            )
            new_value[slot, layer], new_lse[slot, layer] = merge(
                new_value[slot, layer], new_lse[slot, layer], *part
            )
    return new_value, new_lse


def block_attention(
    query,
    summary_key,
    summary_value,
    slots,
    key_pool,
    value_pool,
    rows,
    lens,
    block_key,
    block_value,
    scale,
):
    batch, block, heads, dim = query.shape
    group = heads // block_key.size(2)
    out = torch.zeros(batch, block, heads, dim, dtype=torch.float64)
    for b in range(batch):
        ids = rows[b, : int(lens[b])].tolist()
        keys = torch.stack([row(key_pool, t) for t in ids] + list(block_key[b].double()))
        values = torch.stack([row(value_pool, t) for t in ids] + list(block_value[b].double()))
        for head in range(heads):
            stored = summary_value[int(slots[b]), head].to(query.dtype).double()
            key = torch.cat([summary_key[head].double(), keys[:, head // group]])
            value = torch.cat([stored, values[:, head // group]])
            for slot in range(block):
                score = scale * (key @ query[b, slot, head].double())
                out[b, slot, head] = torch.softmax(score, 0) @ value
    return out


def markov_step(base_logits, prev, markov_w1, markov_w2):
    """Float64 without any rounding."""
    out = base_logits.double()
    for b, token in enumerate(prev.tolist()):
        out[b] += markov_w2.double() @ markov_w1[token].double()
    return out


def murmur(seed, position, token):
    """MurmurHash3 (32 bit) of seed (64 bit) | position (32) | token (32), in Python integers."""
    mask = 0xFFFFFFFF

    def rotate(x, bits):
        return ((x << bits) | (x >> (32 - bits))) & mask

    h = 0
    for word in (seed & mask, (seed >> 32) & mask, position & mask, token & mask):
        word = rotate(word * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
        h = (rotate(h ^ word, 13) * 5 + 0xE6546B64) & mask
    h ^= 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B & mask
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & mask
    return h ^ (h >> 16)


def gumbel(seed, position, token):
    bits = murmur(seed, position, token)
    log_uniform = math.log(bits / 0xFFFFFFFF) if bits else -1.7976931348623157e308
    return -math.log(-min(log_uniform, -(2.0**-32)))


def draft_sample(logits, temperature, seed, position, vocab_limit):
    """Token, log q and the margin by which the token won, of corrected logits [V] (float64)."""
    logits = logits[:vocab_limit].double()
    if temperature == 0:
        score, logq = logits, 0.0
    else:
        scaled = logits / temperature
        noise = [gumbel(seed, position, token) for token in range(vocab_limit)]
        score = scaled + torch.tensor(noise, dtype=torch.float64)
        logq = None
    token = int(score.argmax())
    if logq is None:
        logq = float(scaled[token] - torch.logsumexp(scaled, 0))
    best = score.topk(min(2, vocab_limit)).values
    return token, logq, float(best[0] - best[-1]) if vocab_limit > 1 else math.inf


def accept_chain(
    target_probs, draft_tokens, draft_q, q, uniforms, uniform_final, limit, point_mass
):
    """One request; q: [K, V] float64 draft distributions.

    Returns (accepted, next_token, slack): slack is the smallest distance of any comparison from
    its boundary, so that a test knows when rounding could have decided.
    """
    p = target_probs.double()
    accepted, slack = 0, math.inf
    for j in range(limit):
        token = int(draft_tokens[j])
        threshold = float(uniforms[j]) * (1.0 if point_mass else float(draft_q[j]))
        slack = min(slack, abs(threshold - float(p[j, token])))
        if not threshold < float(p[j, token]):
            break
        accepted += 1
    weight = p[accepted]
    if accepted < limit:
        row_q = q[accepted]
        if point_mass:
            row_q = torch.zeros_like(row_q)
            row_q[int(draft_tokens[accepted])] = 1.0
        residual = (weight - row_q).clamp(min=0)
        if float(residual.sum()) > 1e-8:
            weight = residual
    aim = float(uniform_final) * float(weight.sum())
    running, chosen = 0.0, None
    for token, mass in enumerate(weight.tolist()):
        running += mass
        slack = min(slack, abs(running - aim)) if mass > 0 else slack
        if running > aim and chosen is None:
            chosen = token
    return accepted, chosen, slack


def accept_greedy(target_tokens, draft_tokens, limit):
    accepted = 0
    while accepted < limit and draft_tokens[accepted] == target_tokens[accepted]:
        accepted += 1
    return accepted, int(target_tokens[accepted])
