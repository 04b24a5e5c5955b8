"""Confidence intervals, tests and metrics for success rates and scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

Z_95 = 1.959963984540054  # quantile of the standard normal distribution for two-sided 95 %


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927).

    Raises:
        ValueError: `n` < 1 or `successes` outside [0, n].
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n and n >= 1, got {successes} of {n}")
    from scipy.stats import binomtest  # takes a second to import

    interval = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    # At rates of 0 and 1 the bound equals the rate; rounding must not exclude it.
    return min(successes / n, float(interval.low)), max(successes / n, float(interval.high))


def clustered_interval(clusters: Sequence[tuple[int, int]], *, graded: bool = False) -> tuple[float, float]:
    """95 % score interval of a proportion whose observations come in clusters, such as samples of one initial state.

    Wilson's interval with the effective sample size of Korn and Graubard (1998, Survey Methodology 24:193-201): the
    number of independent observations with the same variance as the ratio estimate over clusters, at most the number of
    observations, and reduced by the ratio of Student's quantiles for few clusters. Where all clusters, or all but one,
    hold nothing but failures, or nothing but successes, the variance says little: they bound the number.

    Args:
        clusters: (successes, observations) of each cluster.
        graded: clusters such as training runs reach rates of 0 or 1 by chance, unlike initial states or tasks, many of
            which certainly fail or succeed; graded clusters bound the number only where all are alike.

    Raises:
        ValueError: no cluster, or one without observations or with impossible counts.
    """
    if not clusters or any(n < 1 or not 0 <= successes <= n for successes, n in clusters):
        raise ValueError("need clusters (successes, n) with 0 <= successes <= n and n >= 1")
    rate = sum(successes for successes, _ in clusters) / sum(n for _, n in clusters)
    alike = max(sum(successes == 0 for successes, _ in clusters), sum(successes == n for successes, n in clusters))
    return _score_interval(rate, _effective_number(rate * (1 - rate), rate, clusters, 0 if graded else alike))


def _effective_number(variance: float, mean: float, clusters: Sequence[tuple[int, int]], alike: int) -> float:
    """How many independent observations have a mean as uncertain as that over clusters (Korn and Graubard).

    Args:
        variance: of a single observation.
        mean: of all observations.
        clusters: (sum, number) of the observations of each cluster.
        alike: number of clusters that hold the same single outcome; if all but one do, clusters bound the number.
    """
    m, total = len(clusters), sum(n for _, n in clusters)
    if m == 1 or variance <= 0.0:
        return m
    from scipy.stats import t

    spread = sum((value - mean * n) ** 2 for value, n in clusters) * m / (m - 1)
    independent = variance * total**2 / spread if spread else math.inf
    for_few = (t.ppf(0.975, total - 1) / t.ppf(0.975, m - 1)) ** 2
    return min(float(independent * for_few), m if m - alike <= 1 else total)


def mixed_group_share(counts: Sequence[tuple[int, int]], group: int) -> float:
    """Expected share of groups of attempts at an initial state in which some succeed and some fail.

    This is the mean over initial states of 1 - p^g - (1 - p)^g, estimated without bias from n >= g attempts with s
    successes: the share among all subsets of g attempts, 1 - [C(s, g) + C(n - s, g)] / C(n, g). With fewer attempts p
    is replaced by s / n, which is too low on average.

    Args:
        counts: (successes, attempts) of each initial state.
        group: g, at least 1.

    Raises:
        ValueError: no initial state, or one without attempts or with impossible counts.
    """
    if group < 1 or not counts or any(n < 1 or not 0 <= s <= n for s, n in counts):
        raise ValueError("need a group of at least 1 and counts (successes, n) with 0 <= successes <= n and n >= 1")

    def share(s: int, n: int) -> float:
        if n < group:
            return 1.0 - (s / n) ** group - (1.0 - s / n) ** group
        return 1.0 - (math.comb(s, group) + math.comb(n - s, group)) / math.comb(n, group)

    # A group of one attempt has one outcome.
    return sum(share(s, n) for s, n in counts) / len(counts) if group > 1 else 0.0


def interval_of_metrics(record: Mapping[str, float]) -> tuple[float, float]:
    """95 % interval of the success of an evaluation during training, from its metrics."""
    if "eval/success_at_end_low" in record:  # several episodes per initial state
        return record["eval/success_at_end_low"], record["eval/success_at_end_high"]
    return wilson_interval(round(record["eval/success_at_end"] * record["eval/n"]), round(record["eval/n"]))


def _score_interval(rate: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval for any n > 0."""
    z = Z_95 * Z_95 / n
    middle = (rate + z / 2) / (1 + z)
    half = math.sqrt(z * rate * (1 - rate) + z * z / 4) / (1 + z)
    return max(0.0, min(rate, middle - half)), min(1.0, max(rate, middle + half))


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """p-value of the two-sided exact McNemar test (McNemar 1947) for equal success of paired outcomes.

    The counts are pairs in which only the first, or only the second, succeeded; 1.0 if no pair is discordant.
    """
    if only_first < 0 or only_second < 0:
        raise ValueError(f"counts of pairs cannot be negative, got {only_first} and {only_second}")
    discordant = only_first + only_second
    if discordant == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(only_first, discordant, 0.5).pvalue)


def tango_interval(only_first: int, only_second: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of the difference of two paired proportions (Tango 1998, Statistics in Medicine 17:891-908).

    The set of differences that the score test does not reject; for a difference of 0 this is McNemar's test. The
    interval stays inside [-1, 1] and has positive width even if no pair, or every pair, is discordant. For comparisons
    with other intervals and worked examples see Fagerland, Lydersen and Laake 2014 (Statistics in Medicine
    33:2850-2875).

    Args:
        only_first: pairs in which only the first succeeded.
        only_second: pairs in which only the second succeeded.
        n: number of pairs.
        z: quantile of the standard normal distribution; 95 % by default.

    Raises:
        ValueError: there are no pairs, or the counts are inconsistent.
    """
    if n < 1 or min(only_first, only_second) < 0 or only_first + only_second > n:
        raise ValueError(f"need n >= 1 pairs, {only_first} and {only_second} of them discordant, got n = {n}")
    return _tango_interval(only_first, only_second, n, z)


def clustered_tango_interval(clusters: Sequence[tuple[int, int, int]]) -> tuple[float, float]:
    """95 % score interval of a paired difference whose pairs come in clusters, such as runs played from the same state.

    `tango_interval` of as many pairs, discordant in the same shares, as independent ones would have the variance of the
    difference over clusters; see `clustered_interval`.

    Args:
        clusters: (pairs in which only the first succeeded, in which only the second did, pairs) of each cluster.

    Raises:
        ValueError: no cluster, or one without pairs or with impossible counts.
    """
    if not clusters or any(n < 1 or min(first, second) < 0 or first + second > n for first, second, n in clusters):
        raise ValueError("need clusters (first, second, n) of n >= 1 pairs, of which first + second are discordant")
    only_first, only_second, total = (sum(counts) for counts in zip(*clusters))
    mean = (only_first - only_second) / total
    variance = (only_first + only_second) / total - mean**2
    alike = max(map(sum, zip(*((first == n, second == n, first == second == 0) for first, second, n in clusters))))
    n = _effective_number(variance, mean, [(first - second, n) for first, second, n in clusters], alike)
    return _tango_interval(only_first * n / total, only_second * n / total, n, Z_95)


def _tango_interval(only_first: float, only_second: float, n: float, z: float) -> tuple[float, float]:
    def accepted(difference: float) -> bool:
        """Whether the score test accepts a difference; q is the maximum-likelihood rate of `only_second` under it."""
        b = (2 * n - only_first + only_second) * difference - only_first - only_second
        c = -only_second * difference * (1 - difference)
        q = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)
        variance = n * max(0.0, 2 * q + difference * (1 - difference))
        return abs(only_first - only_second - n * difference) <= z * math.sqrt(variance)

    estimate = (only_first - only_second) / n

    def end(outside: float) -> float:
        inside = estimate
        for _ in range(60):  # bisections, more than double precision resolves
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if accepted(middle) else (inside, middle)
        return inside

    return end(-1.0), end(1.0)


# With fewer deviating pairs the resampled means take too few distinct values for meaningful quantiles; with none the
# interval has width 0.
BOOTSTRAP_MIN_PAIRS = 10


def paired_bootstrap(
    strata: Sequence[Sequence[int]], *, resamples: int = 10_000, seed: int = 0, level: float = 0.95
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of a paired difference of proportions (Efron and Tibshirani 1993).

    Pairs are resampled within strata, and all strata have the same weight. Unlike `tango_interval`, the interval is too
    narrow if few pairs are discordant.

    Args:
        strata: the pairs of each stratum: 1 if only the first succeeded, -1 if only the second did, else 0.
        resamples: number of bootstrap resamples.
        seed: seed of the resampling.
        level: confidence level.

    Returns:
        (low, high); None if fewer than `BOOTSTRAP_MIN_PAIRS` pairs deviate from the most frequent outcome of their
        stratum.

    Raises:
        ValueError: there is no stratum, or one without pairs.
    """
    if not strata or not all(len(stratum) for stratum in strata):
        raise ValueError("a paired bootstrap needs at least one pair in each stratum")
    counts = [np.array([stratum.count(sign) for sign in (1, -1, 0)]) for stratum in strata]
    if sum(count.sum() - count.max() for count in counts) < BOOTSTRAP_MIN_PAIRS:
        return None
    rng = np.random.default_rng(seed)
    drawn = [rng.multinomial(count.sum(), count / count.sum(), size=resamples) / count.sum() for count in counts]
    means = np.mean([rates[:, 0] - rates[:, 1] for rates in drawn], axis=0)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def mean_interval(estimates: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Mean of independent estimates with a confidence interval (MOVER: Zou and Donner 2008).

    The distances from the estimates to their lower bounds are combined in quadrature, and likewise those to their upper
    bounds, as in Newcombe's interval. With score intervals as input, the width does not vanish at rates of 0 and 1.

    Takes (estimate, low, high) of each, at one confidence level, and returns (mean, low, high); ValueError if empty.
    """
    if not estimates:
        raise ValueError("the mean of no estimates")
    k = len(estimates)
    mean = sum(value for value, _, _ in estimates) / k
    below = math.hypot(*(value - low for value, low, _ in estimates)) / k
    above = math.hypot(*(high - value for value, _, high in estimates)) / k
    return mean, mean - below, mean + above


def newcombe_interval(successes_1: int, n_1: int, successes_2: int, n_2: int) -> tuple[float, float]:
    """95 % interval of the difference of two independent proportions, p1 - p2 (Newcombe 1998, method 10)."""
    p_1, p_2 = successes_1 / n_1, successes_2 / n_2
    (low_1, high_1), (low_2, high_2) = wilson_interval(successes_1, n_1), wilson_interval(successes_2, n_2)
    below = math.hypot(p_1 - low_1, high_2 - p_2)
    above = math.hypot(high_1 - p_1, p_2 - low_2)
    return p_1 - p_2 - below, p_1 - p_2 + above


def auroc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Area under the ROC curve: P(a positive scores above a negative), ties count half (Mann and Whitney 1947).

    NaN if only one class is present.
    """
    positive = np.asarray(labels, dtype=bool)
    n, m = int(positive.sum()), int((~positive).sum())
    if n == 0 or m == 0:
        return math.nan
    from scipy.stats import rankdata

    return float((rankdata(scores)[positive].sum() - n * (n + 1) / 2) / (n * m))


def calibration_error(probabilities: Sequence[float], labels: Sequence[bool], bins: int = 10) -> float:
    """Expected calibration error over bins of equal width (Guo et al., ICML 2017), in [0, 1]."""
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    where = np.minimum((p * bins).astype(int), bins - 1)
    gaps = [abs((p[where == b] - y[where == b]).sum()) for b in range(bins)]
    return float(sum(gaps) / len(p))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; NaN if one of them is constant."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return math.nan  # scipy would warn
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic)
