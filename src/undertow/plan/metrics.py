"""How much of the communication was hidden: the two figures every overlap result is reported with."""

from __future__ import annotations

NEGLIGIBLE_GAIN = 0.05
"""Below this ideal gain the share of it is a quotient of two noises, so none is reported."""


def overlap_efficiency(total: float, gemm: float, serial: float) -> float | None:
    """E = 1 − (T − T_gemm) / (T_serial − T_gemm): 1 if all communication is hidden, 0 if none, negative if it hurts.

    None where the serial time does not exceed the GEMM's: then there was nothing to hide.
    """
    exposed_serially = serial - gemm
    if exposed_serially <= 0:
        return None
    return 1 - (total - gemm) / exposed_serially


def share_of_ideal(total: float, gemm: float, communication: float) -> float | None:
    """(S − 1) / (S_ideal − 1), the part of the greatest possible speed-up that was reached.

    S is (gemm + communication) / total, and S_ideal the same with the longer of the two parts as the total: perfect
    overlap cannot end before its longer part. None where even that would gain less than `NEGLIGIBLE_GAIN`.
    """
    longer = max(gemm, communication)
    if longer <= 0 or total <= 0:
        return None
    ideal_gain = (gemm + communication) / longer - 1
    if ideal_gain < NEGLIGIBLE_GAIN:
        return None
    return ((gemm + communication) / total - 1) / ideal_gain
