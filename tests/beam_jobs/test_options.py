import pytest

from beam_jobs.options import checked
from beam_jobs.workers import cores, here, side_by_side
from rag_model.errors import UsageError


@pytest.mark.parametrize("flags", [[], ["--direct_num_workers=2"], ["--runner=FnApiRunner", "--of_another_engine=1"]])
def test_flags_pass_through(flags: list[str]) -> None:
    assert checked(flags) == tuple(flags)


@pytest.mark.parametrize(
    ("flag", "says"), [("--direct_num_workers=x", "invalid int value: 'x'"), ("--runner=Nope", "no runner Nope")]
)
def test_flags_that_beam_refuses_are_one_sentence(flag: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        checked([flag])
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""


def test_local_workers_are_as_many_as_memory_has_room_for() -> None:
    assert side_by_side([], 10, 10 * cores()) == ()
    assert side_by_side([], 10, 15) == (("--direct_num_workers=1",) if cores() > 1 else ())
    assert side_by_side([], 1 << 60) == (("--direct_num_workers=1",) if cores() > 1 else ())
    for flags in (["--direct_num_workers=9"], ["--runner=FlinkRunner"]):
        assert side_by_side(flags, 1 << 60, 1) == tuple(flags)


@pytest.mark.parametrize("flags", [["--runner=FlinkRunner"], ["--runner", "FlinkRunner"], ["--x=1", "--runner=x"]])
def test_an_engine_that_is_named_has_the_workers(flags: list[str]) -> None:
    assert not here(flags)
    assert here([flag for flag in flags if not flag.startswith("--runner")])
