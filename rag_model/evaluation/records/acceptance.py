"""Accept or refuse a release by its evaluation: floors on figures, and no loss against what the ref names now.

The candidate is *not worse* if the lower end of the interval of the difference, question by question, is at least minus
the tolerance: the test of non-inferiority (Piaggio et al. 2012). With few questions the interval is wide, and more
questions or a larger tolerance are needed. A candidate whose answers are the same has a difference of 0 for every
question, and passes any tolerance.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rag_model.errors import UsageError
from rag_model.evaluation.gate import Check, Verdict
from rag_model.evaluation.records.differences import Pair
from rag_model.store.versions.evaluation_manifest import Figure

Measured = Mapping[str, Figure]
One = TypeVar("One")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a release must reach."""

    floors: Mapping[str, float] = field(default_factory=dict)  # measure -> least value, a share
    tolerance: float | None = 0.02  # share that may be lost against the present one; None: it is not compared
    measures: tuple[str, ...] = ()  # that are compared; none: the one that decides, such as Success@20 or EM

    def __post_init__(self) -> None:
        """Refuse what is no share."""
        for name, floor in self.floors.items():
            if not 0 <= floor <= 1:
                raise UsageError(f"the floor of {name} is {floor}: give a share from 0 to 1")
        if self.tolerance is not None and not 0 <= self.tolerance <= 1:
            raise UsageError(f"the tolerance is {self.tolerance}: give a share from 0 to 1, or none to compare nothing")

    def check(self, found: Mapping[str, object]) -> None:
        """Check that every measure that is named is among those of an evaluation.

        Raises:
            UsageError: one was not measured.
        """
        for name in (*self.floors, *self.measures):
            _named(found, name)


def accept(
    acceptance: Acceptance,
    found: Measured,
    lost: Mapping[str, Pair] | None,
    headline: str,
    collapsed: str = "",
    withdrawn: str = "",
) -> Verdict:
    """Decide whether a ref may move to what was evaluated.

    Args:
        acceptance: what it must reach.
        found: its figures.
        lost: beside those of what the ref names now, by measure; None: the ref is new, or nothing is compared.
        headline: the measure that is compared if none is named.
        collapsed: why the model's retrieval has collapsed; empty: it has not.
        withdrawn: the move by which the ref named the candidate before it was moved away; empty: it never did.

    Raises:
        UsageError: a measure is named that was not measured.
    """
    checks = [
        *_reaches(acceptance, found),
        *_keeps(acceptance, lost, headline),
        *_reads(collapsed),
        *_stands(withdrawn),
    ]
    return Verdict(all(check.passed for check in checks), tuple(checks))


def _reaches(acceptance: Acceptance, found: Measured) -> Iterator[Check]:
    for name, floor in acceptance.floors.items():
        figure = _named(found, name)
        yield Check(
            name,
            figure.value >= floor,
            str(figure),
            f"at least {floor:.3f}",
            "The candidate finds or answers less than you asked for: look at its rows and its report.",
        )


def _keeps(acceptance: Acceptance, lost: Mapping[str, Pair] | None, headline: str) -> Iterator[Check]:
    if lost is None or acceptance.tolerance is None:
        return
    for name in acceptance.measures or (headline,):
        pair = _named(lost, name)
        least = pair.difference.value if pair.difference.low is None else pair.difference.low
        yield Check(
            f"{name} against the present one",
            least >= -acceptance.tolerance,
            f"{pair.difference.value:+.3f}{_ends(pair)}, from {pair.before.value:.3f} to {pair.after.value:.3f}",
            f"{'' if pair.difference.low is None else 'a lower end of '}{-acceptance.tolerance:+.3f} or more",
            "The candidate may be worse than what is served: compare the two with `diff`, or ask more questions.",
        )


def _reads(collapsed: str) -> Iterator[Check]:
    if collapsed:
        why = "The model does not use its passages: train it longer, or look at its ablations."
        yield Check("use of passages", False, collapsed, "no collapse", why)


def _stands(withdrawn: str) -> Iterator[Check]:
    """Refuse what people have rolled back: a schedule must not undo it."""
    if withdrawn:
        why = "The ref was moved away from this snapshot: release a new one, or move the ref by hand with `tag`."
        left = f"a snapshot that {withdrawn} named and that the ref was moved away from"
        yield Check("the candidate", False, left, "one that the ref never left", why)


def _named(some: Mapping[str, One], name: str) -> One:
    if name not in some:
        raise UsageError(f"{name!r} was not measured: choose from {', '.join(some)}")
    return some[name]


def _ends(pair: Pair) -> str:
    low, high = pair.difference.low, pair.difference.high
    return "" if low is None or high is None else f" [{low:+.3f}, {high:+.3f}]"
