"""The formulas written once more, slowly: Python floats and loops over rows and tokens, nothing shared with rlvla."""

import math


def rows_of(tensor):
    return [[float(x) for x in row] for row in tensor.tolist()]


def masks_of(tensor):
    return [[bool(x) for x in row] for row in tensor.tolist()]


def zeros_like(mask):
    return [[0.0] * len(row) for row in mask]


def valid(values, mask):
    return [v for vs, ms in zip(values, mask) for v, m in zip(vs, ms) if m]


def mean_var(values, mask, ddof=1):
    kept = valid(values, mask)
    mean = math.fsum(kept) / (len(kept) + 1e-8)
    var = math.fsum((v - mean) ** 2 for v in kept) / (len(kept) + 1e-8)
    return mean, var * len(kept) / (len(kept) - 1) if ddof else var


def whiten(values, mask):
    mean, var = mean_var(values, mask)
    return [[(v - mean) / math.sqrt(var + 1e-8) if m else 0.0 for v, m in zip(vs, ms)] for vs, ms in zip(values, mask)]


def members(ids, row):
    return [i for i in range(len(ids)) if ids[i] == ids[row]]


def scores_of(rewards, mask):
    return [math.fsum(r for r, m in zip(rs, ms) if m) for rs, ms in zip(rewards, mask)]


def broadcast(per_row, mask):
    return [[a if m else 0.0 for m in ms] for a, ms in zip(per_row, mask)]


def group_mean(scores, ids, row):
    group = members(ids, row)
    return 0.0 if len(group) == 1 else math.fsum(scores[i] for i in group) / len(group)


def group_std(scores, ids, row):
    group = members(ids, row)
    mean = math.fsum(scores[i] for i in group) / len(group)
    return math.sqrt(math.fsum((scores[i] - mean) ** 2 for i in group) / (len(group) - 1))


def grpo_rows(scores, ids, norm_by_std=True):
    result = []
    for i, s in enumerate(scores):
        a = s - group_mean(scores, ids, i)
        if norm_by_std and len(members(ids, i)) == 1:
            a /= 1 + 2.0**-20  # 1 + 1e-6 in single precision
        elif norm_by_std:
            a /= group_std(scores, ids, i) + 1e-6
        result.append(a)
    return result


def gae(rewards, mask, values, gamma, lam):
    adv, ret = zeros_like(mask), zeros_like(mask)
    for i, ms in enumerate(mask):
        next_value = running = 0.0
        for t in reversed(range(len(ms))):
            if ms[t]:
                running = rewards[i][t] + gamma * next_value - values[i][t] + gamma * lam * running
                next_value = values[i][t]
                adv[i][t], ret[i][t] = running, running + values[i][t]
    return whiten(adv, mask), ret


def return_to_go(rewards, mask, gamma=1.0):
    out = zeros_like(mask)
    for i, ms in enumerate(mask):
        running = 0.0
        for t in reversed(range(len(ms))):
            if ms[t]:
                running = rewards[i][t] + gamma * running
                out[i][t] = running
    return out


def passk_rows(scores, ids, norm_by_std=True):
    out = [0.0] * len(scores)
    for i in range(len(scores)):
        group = members(ids, i)
        ordered = sorted((scores[j] for j in group), reverse=True)
        if i == max(group, key=lambda j: scores[j]):
            out[i] = (ordered[0] - ordered[1]) / ((group_std(scores, ids, i) + 1e-6) if norm_by_std else 1.0)
    return out


def rloo_rows(scores, ids, singleton="raw"):
    out = []
    for i, s in enumerate(scores):
        others = [scores[j] for j in members(ids, i) if j != i]
        lone = s if singleton == "raw" else 0.0
        out.append(s - math.fsum(others) / len(others) if others else lone)
    return out


def opo_rows(scores, mask, ids):
    out = []
    for i, s in enumerate(scores):
        group = members(ids, i)
        weight = sum(sum(mask[j]) for j in group)
        base = math.fsum(sum(mask[j]) * scores[j] for j in group) / max(weight, 1)
        out.append(s - base if len(group) > 1 else s)
    return out


def token_baseline(rewards, mask, ids, log_probs, squares, weights=None, zero_tail=True):
    returns = return_to_go(rewards, mask)
    energy = zeros_like(mask)
    for i, ms in enumerate(mask):
        total = 0.0
        for t, m in enumerate(ms):
            if m:
                w = 1 - 2 * math.exp(log_probs[i][t]) + squares[i][t]
                total += w * (weights[i][t] ** 2 if weights else 1.0)
                energy[i][t] = total
    out = zeros_like(mask)
    for i, ms in enumerate(mask):
        group = members(ids, i)
        lengths = sorted((sum(mask[j]) for j in group), reverse=True)
        for t, m in enumerate(ms):
            if not m:
                continue
            base = 0.0
            if len(group) > 1:
                here = [j for j in group if mask[j][t]]
                base = math.fsum(returns[j][t] * energy[j][t] for j in here)
                base /= math.fsum(energy[j][t] for j in here) + 1e-8
                longest = sum(ms) == lengths[0] and lengths[0] > lengths[1]
                if zero_tail and longest and t >= lengths[1]:
                    base = 0.0
            out[i][t] = returns[i][t] - base
    return out, returns


def aggregate(loss, mask, mode, num_tokens=None, num_sequences=None, dp_size=1, horizon=None):
    tokens = num_tokens or max(sum(map(sum, mask)), 1)
    sequences = num_sequences or max(sum(any(ms) for ms in mask), 1)
    if mode == "token-mean":
        return math.fsum(valid(loss, mask)) / tokens * dp_size
    if mode == "token-sum":
        return math.fsum(valid(loss, mask)) * dp_size
    total = 0.0
    for ls, ms in zip(loss, mask):
        row = math.fsum(v for v, m in zip(ls, ms) if m)
        total += row / (sum(ms) + 1e-8) if mode == "seq-mean-token-mean" else row
    total = total / sequences * dp_size
    return total / (horizon or len(mask[0])) if mode == "seq-mean-token-sum-norm" else total


def clip(x, low, high):
    return min(max(x, low), high)


def token_loss(name, new, old, adv, row_ratio=None, *, low=0.2, high=0.2, dual=None, **options):
    """The per-token loss of one token; `row_ratio` is the row's mean log-ratio, for gspo."""
    ratio = math.exp(clip(new - old, -20, 20))
    if name == "ppo":
        loss = max(-adv * ratio, -adv * clip(ratio, 1 - low, 1 + high))
        return min(loss, -adv * dual) if dual is not None and adv < 0 else loss
    if name == "gspo":
        ratio = math.exp(min(row_ratio, 10.0))
        return max(-adv * ratio, -adv * clip(ratio, 1 - low, 1 + high))
    if name == "sapo":
        tau = options.get("tau_pos", 1.0) if adv > 0 else options.get("tau_neg", 1.05)
        return -adv * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    if name == "gpg":
        return -adv * new
    if name == "cispo":
        return -clip(ratio, 1 - low, 1 + high) * adv * new
    if name == "dro":
        return -(adv * new - options.get("beta", 0.1) / 2 * (new - old) ** 2)
    p, q = math.exp(new), math.exp(old)
    if name == "dppo_tv":
        inside = p - q <= high if adv > 0 else p - q >= -low
    else:
        kl = q * (old - new) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        inside = (kl <= high or p <= q) if adv > 0 else (kl <= low or p >= q)
    return -adv * min(ratio, dual or 20.0) * new if inside else 0.0


def policy_loss(name, new, old, adv, mask, mode="token-mean", weights=None, counts=None, **options):
    loss = zeros_like(mask)
    for i, ms in enumerate(mask):
        kept = [n - o for n, o, m in zip(new[i], old[i], ms) if m]
        row_ratio = math.fsum(kept) / max(len(kept), 1)
        for t, m in enumerate(ms):
            if m:
                loss[i][t] = token_loss(name, new[i][t], old[i][t], adv[i][t], row_ratio, **options)
                loss[i][t] *= weights[i][t] if weights else 1.0
    if name in ("gspo", "sapo"):
        mode = "seq-mean-token-mean"
    return aggregate(loss, mask, mode, **(counts or {}))


def geo_mean(new, old, adv, mask, low, high, weights=None):
    total = 0.0
    for i, ms in enumerate(mask):
        where = [t for t, m in enumerate(ms) if m]
        if not where:
            continue
        n = len(where) + 1e-8
        log_ratio = 0.0
        for t in where:
            lr = new[i][t] - old[i][t]
            if adv[i][t] > 0:
                lr = min(lr, high)
            elif adv[i][t] < 0:
                lr = max(lr, -low)
            log_ratio += lr
        row = -math.fsum(adv[i][t] for t in where) / n * math.exp(log_ratio / n)
        if weights:
            row *= math.exp(math.fsum(math.log(weights[i][t] + 1e-10) for t in where) / n)
        total += row
    return total / len(mask)


def covariances(new, adv, mask):
    """{(row, token): covariance} over the valid tokens."""
    mean_new, mean_adv = mean_var(new, mask, 0)[0], mean_var(adv, mask, 0)[0]
    return {
        (i, t): (adv[i][t] - mean_adv) * (new[i][t] - mean_new)
        for i, ms in enumerate(mask)
        for t, m in enumerate(ms)
        if m
    }
