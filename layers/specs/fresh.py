"""Initial values of parameters, where a family departs from the usual ones: matrices from a normal
distribution of `initializer_range`, biases of zero, and norms of one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Normal:
    """A normal distribution around zero with the standard deviation `std`."""

    std: float


@dataclass(frozen=True)
class Truncated:
    """A normal distribution around zero with the standard deviation `std`, without values beyond `bound`."""

    std: float
    bound: float


@dataclass(frozen=True)
class Uniform:
    """A uniform distribution from `-bound` to `bound`."""

    bound: float


@dataclass(frozen=True)
class Constant:
    """One value for all elements."""

    value: float


@dataclass(frozen=True)
class LogRates:
    """Logarithms of rates of decay that are uniform between two bounds."""

    slowest: float
    fastest: float


@dataclass(frozen=True)
class StepBiases:
    """Biases whose softplus, the time step, is uniform in its logarithm between two bounds and at least
    `floor` (Mamba, arXiv:2312.00752, section 3.6).
    """

    shortest: float = 0.001
    longest: float = 0.1
    floor: float = 0.0001


Fresh = Normal | Truncated | Uniform | Constant | LogRates | StepBiases
