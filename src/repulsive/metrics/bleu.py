"""BLEU from summed n-gram counts, so that any subset of the sentences can be scored."""

from __future__ import annotations

from torch import Tensor

ORDER = 4  # longest n-gram
COLUMNS = 2 + 2 * ORDER  # words in hypothesis and reference, n-grams in common, n-grams in the hypothesis


def bleu_of(totals: Tensor) -> Tensor:
    r"""BLEU of summed counts, $100 \, e^{\min(0, 1 - r / h)} \prod_{n=1}^4 (c_n / t_n)^{1/4}$; 0 where any $c_n$ is 0.

    Source: Papineni et al. (2002), without smoothing.

    Args:
        totals: [..., 10]: words h and r in hypothesis and reference, then the numbers c_n of n-grams in common
            for n = 1 to 4, then the numbers t_n of n-grams in the hypothesis for n = 1 to 4.

    Returns:
        [...], float64.
    """
    h, r, c, t = totals.double().split([1, 1, ORDER, ORDER], dim=-1)
    precision = (c / t.clamp(min=1)).log().mean(-1)  # [...]: minus infinity where one is 0
    brevity = (1 - r / h.clamp(min=1)).clamp(max=0).squeeze(-1)
    return 100 * (precision + brevity).exp()
