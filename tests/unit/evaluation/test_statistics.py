"""Intervals and tests of success rates, against published and independently computed values."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import multinomial

from rlvla.evaluation.statistics import (
    BOOTSTRAP_MIN_PAIRS,
    clustered_interval,
    clustered_tango_interval,
    mcnemar_exact,
    mean_interval,
    mixed_group_share,
    newcombe_interval,
    paired_bootstrap,
    tango_interval,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, Statistics in Medicine 17, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_published_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("successes", "n"), [(3, 7), (90, 100), (1, 2)])
def test_bounds_solve_the_score_equation(successes: int, n: int) -> None:
    z = 1.959963984540054
    for bound in wilson_interval(successes, n):
        assert abs(successes / n - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / n), rel=1e-9)


def test_success_and_failure_are_mirror_images() -> None:
    low, high = wilson_interval(13, 40)
    assert wilson_interval(27, 40) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 3), (4, 3)])
def test_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(successes, n)


@pytest.mark.parametrize(("only_first", "only_second"), [(7, 1), (0, 5), (12, 12), (3, 9), (0, 0)])
def test_mcnemar_is_a_fair_coin_over_discordant_pairs(only_first: int, only_second: int) -> None:
    n, k = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    assert mcnemar_exact(only_first, only_second) == pytest.approx(min(1.0, 2 * tail))
    assert mcnemar_exact(only_first, only_second) == mcnemar_exact(only_second, only_first)


@pytest.mark.parametrize(
    ("gained", "lost", "n", "z", "low", "high", "digits"),
    [
        (1, 7, 21, 1.96, -0.517, -0.026, 3),  # Fagerland et al. 2014: airway hyper-responsiveness before and after
        (6, 16, 161, 1.96, -0.1240, -0.0054, 4),  # the same: complete response before and after consolidation therapy
        (28, 25, 618, 1.6448536, -0.0148, 0.0247, 4),  # R, PropCIs::scoreci.mp(25, 28, 618, 0.90)
    ],
)
def test_published_paired_differences(
    gained: int, lost: int, n: int, z: float, low: float, high: float, digits: int
) -> None:
    assert tango_interval(gained, lost, n, z) == pytest.approx((low, high), abs=0.6 * 10**-digits)
    assert tango_interval(lost, gained, n, z) == pytest.approx((-high, -low), abs=0.6 * 10**-digits)


@pytest.mark.parametrize("n", [1, 4, 10, 100])
def test_paired_differences_are_never_certain(n: int) -> None:
    """By hand: z^2 / (n + z^2) on both sides of 0 with none discordant; from (n - z^2) / (n + z^2) with all."""
    z_2 = 1.959963984540054**2
    assert tango_interval(0, 0, n) == pytest.approx((-z_2 / (n + z_2), z_2 / (n + z_2)))
    assert tango_interval(n, 0, n) == pytest.approx((max((n - z_2) / (n + z_2), -1.0), 1.0))


def test_an_interval_of_pairs_leaves_out_0_where_mcnemars_score_test_rejects() -> None:
    for gained in range(12):
        for lost in range(12):
            low, high = tango_interval(gained, lost, 25)
            assert -1.0 <= low <= (gained - lost) / 25 <= high <= 1.0
            rejected = gained != lost and (gained - lost) ** 2 / (gained + lost) > 1.96**2
            assert rejected == (low > 0 or high < 0), (gained, lost)


@pytest.mark.parametrize("n", [10, 20, 40])
def test_paired_intervals_have_nominal_coverage(n: int) -> None:
    """Exactly, over all tables of n pairs; the percentile bootstrap covers 85 % in one of these cases."""
    tables = [(gained, lost) for gained in range(n + 1) for lost in range(n + 1 - gained)]
    ends = np.array([tango_interval(gained, lost, n) for gained, lost in tables])
    counts = np.array([(gained, lost, n - gained - lost) for gained, lost in tables])
    coverage = []
    for gain in np.arange(0, 1.01, 0.1):
        for loss in [0.02, *np.arange(0, 1.01 - gain, 0.1)]:
            if gain + loss > 1:
                continue
            chances = multinomial.pmf(counts, n, [gain, loss, max(0.0, 1 - gain - loss)])
            inside = (ends[:, 0] <= gain - loss + 1e-9) & (gain - loss <= ends[:, 1] + 1e-9)
            coverage.append(chances[inside].sum())
    assert min(coverage) > 0.92 and np.mean(coverage) > 0.95


def test_combined_paired_intervals_have_nominal_coverage() -> None:
    """The mean over suites that differ in size and difficulty."""
    rng = np.random.default_rng(0)
    suites = [(20, 0.1, 0.02), (20, 0.6, 0.0), (50, 0.02, 0.0), (50, 0.3, 0.1)]
    true = sum(gain - loss for _, gain, loss in suites) / len(suites)
    draws = [rng.multinomial(n, [gain, loss, 1 - gain - loss], size=500) for n, gain, loss in suites]
    intervals: dict[tuple[int, int, int], tuple[float, float]] = {}
    covered = 0
    for tables in zip(*draws):
        estimates = []
        for gained, lost, equal in (map(int, table) for table in tables):
            n = gained + lost + equal
            low, high = intervals.setdefault((gained, lost, n), tango_interval(gained, lost, n))
            estimates.append(((gained - lost) / n, low, high))
        _, low, high = mean_interval(estimates)
        covered += low <= true <= high
    assert 0.935 < covered / 500 < 0.99


def test_paired_bootstrap_agrees_with_the_normal_approximation() -> None:
    signs = [1] * 60 + [0] * 130 + [-1] * 10
    n, mean = len(signs), sum(signs) / len(signs)
    error = 1.96 * math.sqrt(sum((d - mean) ** 2 for d in signs) / n / n)
    whole = paired_bootstrap([signs])
    assert whole == pytest.approx((mean - error, mean + error), abs=0.006)
    assert whole == paired_bootstrap([signs]) != paired_bootstrap([signs], seed=1)
    narrow = paired_bootstrap([signs], level=0.5)
    assert whole and narrow and whole[0] < narrow[0] < narrow[1] < whole[1]
    # A second stratum that does not vary halves difference and spread.
    half = paired_bootstrap([signs, [1] * 7])
    assert half == pytest.approx((0.5 + (mean - error) / 2, 0.5 + (mean + error) / 2), abs=0.003)


def test_no_bootstrap_of_hardly_any_differing_pairs() -> None:
    few = BOOTSTRAP_MIN_PAIRS - 1
    assert paired_bootstrap([[0] * 30]) is None and paired_bootstrap([[1] * 30]) is None
    assert paired_bootstrap([[1] * few + [0] * 30]) is None and paired_bootstrap([[0] * few + [-1] * 30]) is None
    assert paired_bootstrap([[1] * few + [0] * 30, [0, 0, -1]]) is not None


@pytest.mark.parametrize(
    ("a", "m", "b", "n", "low", "high"),
    [(56, 70, 48, 80, 0.0524, 0.3339), (9, 10, 3, 10, 0.1705, 0.8090), (10, 10, 0, 10, 0.6075, 1.0)],
)
def test_published_differences(a: int, m: int, b: int, n: int, low: float, high: float) -> None:
    """Newcombe 1998, Statistics in Medicine 17, table II, method 10."""
    assert newcombe_interval(a, m, b, n) == pytest.approx((low, high), abs=5e-5)


def test_invalid_counts_of_pairs_are_errors() -> None:
    with pytest.raises(ValueError, match="pair"):
        paired_bootstrap([])
    with pytest.raises(ValueError, match="pair"):
        paired_bootstrap([[0], []])
    for counts in ((0, 0, 0), (2, 2, 3), (-1, 0, 5)):
        with pytest.raises(ValueError, match="pairs"):
            tango_interval(*counts)
    with pytest.raises(ValueError, match="negative"):
        mcnemar_exact(-1, 0)


@pytest.mark.parametrize("n", [1, 4, 7, 50, 100, 200, 1000, 4096])
def test_the_wilson_interval_holds_the_rate_itself(n: int) -> None:
    """Also at rates of 0 and 1, where rounding could put its end beyond: error bars would be negative."""
    for successes in (0, 1, n // 2, n):
        low, high = wilson_interval(successes, n)
        assert 0.0 <= low <= successes / n <= high <= 1.0


def test_independent_observations_in_clusters_have_nearly_the_interval_of_wilson() -> None:
    """Each state has its share of the successes: nothing depends on the state."""
    even = clustered_interval([(1, 2)] * 100)
    assert even == pytest.approx(wilson_interval(100, 200), abs=1e-12), "at most as many as there are"
    single = clustered_interval([(1, 1)] * 30 + [(0, 1)] * 70)
    assert single == pytest.approx(wilson_interval(30, 100), abs=2e-3)


def test_clusters_of_equal_outcomes_count_as_one_observation_each() -> None:
    assert clustered_interval([(4, 4)] * 30 + [(0, 4)] * 70) == pytest.approx(wilson_interval(30, 100), abs=2e-3)
    for rate in (0, 4):
        assert clustered_interval([(rate, 4)] * 50) == pytest.approx(wilson_interval(50 * (rate > 0), 50), abs=1e-12)
    low, high = clustered_interval([(1, 4)])
    assert low < 0.1 and high > 0.7, "a single state says little"


def test_one_cluster_that_differs_does_not_make_an_interval_narrow() -> None:
    """Five tasks of twenty episodes: from none solved to two, and mirrored."""
    ends = [clustered_interval([(solved, 20)] + [(0, 20)] * 4) for solved in range(3)]
    assert [low for low, _ in ends] == sorted(low for low, _ in ends)
    assert [high for _, high in ends] == sorted(high for _, high in ends) and ends[0][1] > 0.43
    runs = clustered_interval([(98, 100), (100, 100), (100, 100)], graded=True)
    assert 0.85 < runs[0] < 0.95, "two of three runs at 100 % are not two outcomes"
    mirrored = clustered_interval([(18, 20)] + [(20, 20)] * 4)
    assert mirrored == pytest.approx((1 - ends[2][1], 1 - ends[2][0]))
    paired = [clustered_tango_interval([(20 - kept, 0, 20)] + [(20, 0, 20)] * 4) for kept in range(3)]
    assert [low for low, _ in paired] == sorted((low for low, _ in paired), reverse=True) and paired[1][0] < 0.2


@pytest.mark.parametrize("tasks", [5, 10])
def test_intervals_over_few_tasks_that_mostly_fail_cover_the_rate(tasks: int) -> None:
    rng, hits = np.random.default_rng(0), 0
    for _ in range(1000):
        counts = rng.binomial(20, rng.beta(0.15, 1.35, size=tasks))
        low, high = clustered_interval([(int(count), 20) for count in counts])
        hits += low <= 0.1 <= high
    assert hits > 900, hits


def test_clustered_intervals_cover_the_rate() -> None:
    """25 states, 4 samples each, success probabilities of the states spread widely: the naive interval covers less."""
    rng, hits, naive = np.random.default_rng(0), 0, 0
    for _ in range(1000):
        p = rng.beta(0.5, 0.9, size=25)
        counts = rng.binomial(4, p)
        low, high = clustered_interval([(int(c), 4) for c in counts])
        hits += low <= 0.5 / 1.4 <= high
        low, high = wilson_interval(int(counts.sum()), 100)
        naive += low <= 0.5 / 1.4 <= high
    assert 935 <= hits <= 985 and naive < 870


@pytest.mark.parametrize("clusters", [[], [(1, 0)], [(3, 2)], [(-1, 2)]])
def test_invalid_clusters(clusters: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="clusters"):
        clustered_interval(clusters)


def test_pairs_of_the_same_outcome_in_a_cluster_count_once() -> None:
    single = tango_interval(20, 10, 100)
    assert clustered_tango_interval([(1, 0, 1)] * 20 + [(0, 1, 1)] * 10 + [(0, 0, 1)] * 70) == pytest.approx(
        single, abs=2e-3
    )
    assert clustered_tango_interval([(3, 0, 3)] * 20 + [(0, 3, 3)] * 10 + [(0, 0, 3)] * 70) == pytest.approx(
        single, abs=2e-3
    )
    spread = clustered_tango_interval([(1, 0, 3)] * 60 + [(0, 1, 3)] * 30 + [(0, 0, 3)] * 10)
    assert spread == pytest.approx(tango_interval(60, 30, 300)), "never more than there are"
    for equal in ((0, 0, 3), (3, 0, 3), (0, 3, 3)):
        first, second, n = (20 * count // 3 for count in equal)
        assert clustered_tango_interval([equal] * 20) == pytest.approx(tango_interval(first, second, n))


def test_clustered_intervals_of_pairs_cover_the_difference() -> None:
    """25 states, three runs from each; states affect the policies very differently: the naive interval covers less."""
    rng, hits, naive = np.random.default_rng(0), 0, 0
    shares = np.array([0.6, 0.2, 1.0])  # of Dirichlet's distribution: gained, lost, equal
    true = (shares[0] - shares[1]) / shares.sum()
    for _ in range(1000):
        counts = [rng.multinomial(3, rng.dirichlet(shares)) for _ in range(25)]
        low, high = clustered_tango_interval([(int(gained), int(lost), 3) for gained, lost, _ in counts])
        hits += low <= true <= high
        gained, lost, _ = (int(count) for count in np.sum(counts, axis=0))
        low, high = tango_interval(gained, lost, 75)
        naive += low <= true <= high
    assert 930 <= hits <= 985 and naive < 900, (hits, naive)


@pytest.mark.parametrize("clusters", [[], [(0, 0, 0)], [(2, 2, 3)], [(-1, 0, 2)]])
def test_invalid_clusters_of_pairs(clusters: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="clusters"):
        clustered_tango_interval(clusters)


@pytest.mark.parametrize(("s", "n", "group"), [(0, 4, 2), (1, 5, 3), (3, 6, 4), (4, 4, 4), (2, 4, 4), (2, 5, 1)])
def test_the_share_of_mixed_groups_counts_all_subsets(s: int, n: int, group: int) -> None:
    outcomes = [True] * s + [False] * (n - s)
    subsets = list(itertools.combinations(outcomes, group))
    slow = sum(any(subset) and not all(subset) for subset in subsets) / len(subsets)
    assert mixed_group_share([(s, n)], group) == pytest.approx(slow)


def test_the_share_of_mixed_groups_has_no_bias() -> None:
    p, n, group = 0.15, 9, 4
    mean = sum(math.comb(n, s) * p**s * (1 - p) ** (n - s) * mixed_group_share([(s, n)], group) for s in range(n + 1))
    assert mean == pytest.approx(1 - p**group - (1 - p) ** group)
    assert mixed_group_share([(1, 2), (0, 2)], 4) == pytest.approx((1 - 2 * 0.5**4) / 2), "p is estimated"
    for counts, size in (([], 2), ([(3, 2)], 2), ([(0, 0)], 2), ([(1, 2)], 0)):
        with pytest.raises(ValueError):
            mixed_group_share(counts, size)
