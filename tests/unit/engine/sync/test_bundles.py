"""The bundles of a sync: their keys, and one error for all of them."""

from __future__ import annotations

from torchferry.core.report import FetchReport
from torchferry.core.tree import Path
from torchferry.engine.pull.fetch import Fetched
from torchferry.engine.sync.bundles import IncomingBundle, _BundleFetches, bundle_keys
from torchferry.errors import LinkBroken, TargetTorn, torn_after
from torchferry.tensors.kinds import RebuildContext

MOMENT: Path = ("optim", "state", 0, "exp_avg")
OTHER: Path = ("optim", "state", 0, "exp_avg_sq")
WEIGHT: Path = ("model", "weight")


def receiving(*bundles: list[Path]) -> _BundleFetches:
    incoming = [IncomingBundle(str(number), [], paths, False) for number, paths in enumerate(bundles)]
    return _BundleFetches(incoming, {}, 1, 1.0, RebuildContext())


def torn_in_fetch() -> TargetTorn:
    """Return the error of a fetch of a bundle with both moments, of which the first is torn."""
    keys = [f"['{key}']" for key in bundle_keys([MOMENT, OTHER])]
    return torn_after(LinkBroken("reset"), whole=[], torn=keys[:1], untouched=keys[1:])


def test_the_keys_of_a_bundle_differ_although_its_paths_have_equal_text() -> None:
    paths: list[Path] = [("a.b (2)",), ("a", "b"), ("a.b",), ("a.b (2)", "x")]
    keys = bundle_keys(paths)
    assert len(set(keys)) == len(paths)


def test_a_torn_bundle_is_listed_by_paths_of_the_whole_state() -> None:
    one = receiving([MOMENT, OTHER])
    one.results = {0: torn_in_fetch()}
    error = one.error()
    assert isinstance(error, TargetTorn)
    assert isinstance(error, ConnectionError)
    assert (error.torn, error.untouched) == (("optim.state[0].exp_avg",), ("optim.state[0].exp_avg_sq",))


def test_one_error_lists_the_paths_of_all_bundles() -> None:
    two = receiving([MOMENT, OTHER], [WEIGHT])
    report = FetchReport(1, "", 0, 0, 0, 0, {}, {}, True, True)
    two.results = {0: torn_in_fetch(), 1: Fetched(None, 1, report)}
    error = two.error()
    assert isinstance(error, TargetTorn)
    assert (error.whole, error.torn) == (("model.weight",), ("optim.state[0].exp_avg",))
