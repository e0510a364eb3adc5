"""The kernel on toy classes: nothing of torch or transformers is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import wrapt

from hf_accum_fix.errors import ForeignPatchError
from hf_accum_fix.upstream.patch import Installation, Patch, install, restore


class Base:
    def inherited(self, x: int) -> str:
        return f"inherited {x}"


class Toy(Base):
    def method(self, x: int) -> str:
        return f"method {x}"

    @staticmethod
    def static(x: int) -> str:
        return f"static {x}"

    @classmethod
    def of_class(cls, x: int) -> str:
        return f"{cls.__name__} {x}"


ORIGINALS = {name: vars(Toy)[name] for name in ("method", "static", "of_class")}
METHOD = ORIGINALS["method"]


def pristine(function: Any, name: str) -> bool:
    return function is ORIGINALS.get(name, vars(Base).get(name))


def wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    if result.startswith(("method", "inherited")):
        assert isinstance(instance, Base) and len(args) + len(kwargs) == 1
    return f"ours({result})"


def wrap(*names: str, allowed: tuple[str, ...] = ()) -> Installation:
    return install([Patch(Toy, name, wrapper) for name in names], pristine, allowed)


@pytest.fixture(autouse=True)
def no_toy_residue() -> Iterator[None]:
    yield
    after = {name: value for name, value in vars(Toy).items() if not name.startswith("__")}
    residue = after != ORIGINALS
    for name in after.keys() - ORIGINALS.keys():
        delattr(Toy, name)
    for name, original in ORIGINALS.items():
        setattr(Toy, name, original)
    assert not residue, f"the test left Toy changed: {after}"


def call(name: str, owner: type = Toy) -> list[str]:
    """The method called in every way there is."""
    unbound = getattr(owner, name)
    through_class = unbound(owner(), 1) if name in ("method", "inherited") else unbound(1)
    return [getattr(owner(), name)(1), getattr(owner(), name)(x=1), through_class]


@pytest.mark.parametrize(
    ("name", "result"),
    [("method", "method 1"), ("static", "static 1"), ("of_class", "Toy 1"), ("inherited", "inherited 1")],
)
def test_every_kind_of_method_is_wrapped_and_comes_back_as_the_identical_object(name: str, result: str) -> None:
    before = vars(Toy).get(name)
    installation = wrap(name)
    assert call(name) == [f"ours({result})"] * 3
    restore([installation])
    assert call(name) == [result] * 3
    assert vars(Toy).get(name) is before


def test_a_failure_takes_back_what_was_already_installed() -> None:
    Toy.replaced = lambda self, x: "another"  # type: ignore[attr-defined]
    with pytest.raises(ForeignPatchError):
        wrap("method", "static", "replaced")
    assert vars(Toy)["method"] is METHOD
    assert vars(Toy)["static"] is ORIGINALS["static"]
    del Toy.replaced  # type: ignore[attr-defined]


def traced(function: Callable[..., Any], counted: list[int]) -> Callable[..., Any]:
    # The cells of a closure are sorted by name: the function is not in the first one.
    @functools.wraps(function)
    def trace(self: Any, x: int) -> Any:
        counted.append(x)
        return f"traced({function(self, x)})"

    return trace


def traced_by_wrapt(function: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    def trace(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert instance is None or isinstance(instance, Toy)
        seen.append(1)
        return f"traced({wrapped(*args, **kwargs)})"

    return wrapt.FunctionWrapper(function, trace)


def refused(installation: Installation, ours: dict[str, Any], foreign: Any, name: str) -> None:
    """What is on top of ours has to go first."""
    with pytest.raises(ForeignPatchError, match=rf"Toy\.method \(now of .*{name}"):
        restore([installation])
    assert vars(Toy)["static"] is ours["static"] and vars(Toy)["method"] is foreign
    Toy.method = ours["method"]  # type: ignore[method-assign]
    assert installation.replacements() == {}
    restore([installation])


TRACERS = pytest.mark.parametrize("tracer", [traced, traced_by_wrapt])


@TRACERS
def test_a_foreign_wrapper_stays_outside_and_is_still_called(tracer: Callable[..., Any]) -> None:
    seen: list[int] = []
    foreign = Toy.method = tracer(METHOD, seen)  # type: ignore[method-assign]
    installation = wrap("method")
    assert vars(Toy)["method"] is foreign
    assert call("method")[0] == "traced(ours(method 1))" and call("method")[2] == "traced(ours(method 1))"
    assert len(seen) == 6 and installation.replacements() == {}
    restore([installation])
    assert vars(Toy)["method"] is foreign and foreign.__wrapped__ is METHOD  # type: ignore[attr-defined]
    assert Toy().method(1) == "traced(method 1)"
    Toy.method = METHOD  # type: ignore[method-assign]


@TRACERS
@pytest.mark.parametrize("read", [lambda: Toy.method, lambda: vars(Toy)["method"]], ids=["class", "vars"])
def test_a_wrapper_put_on_later_works_and_has_to_go_first(read: Callable[[], Any], tracer: Callable[..., Any]) -> None:
    installation = wrap("static", "method")
    ours, foreign = dict(vars(Toy)), tracer(read(), [])
    Toy.method = foreign  # type: ignore[method-assign]
    assert call("method")[0] == "traced(ours(method 1))" and installation.replacements() == {}
    refused(installation, ours, foreign, "trace")


def test_a_foreign_wrapper_that_unwraps_itself_leaves_ours_to_be_restored() -> None:
    Toy.method = traced_by_wrapt(METHOD, [])  # type: ignore[method-assign, assignment]
    installation = wrap("method")
    Toy.method = vars(Toy)["method"].__wrapped__  # type: ignore[method-assign]
    assert Toy().method(1) == "ours(method 1)"
    restore([installation])


def test_a_replacement_is_refused_by_name() -> None:
    def replacement(self: Any, x: int) -> str:
        return f"replaced {x}"

    Toy.method = replacement  # type: ignore[method-assign]
    name = f"{__name__}.{replacement.__qualname__}"
    with pytest.raises(ForeignPatchError, match="allow_foreign") as refused:
        wrap("method")
    assert name in str(refused.value)
    installation = wrap("method", allowed=(name,))
    assert Toy().method(1) == "ours(replaced 1)"
    restore([installation])
    assert vars(Toy)["method"] is replacement
    Toy.method = METHOD  # type: ignore[method-assign]


def test_a_function_that_only_claims_to_wrap_is_a_replacement() -> None:
    @functools.wraps(METHOD)
    def claims(self: Any, x: int) -> str:
        return "something else"

    Toy.method = claims  # type: ignore[method-assign]
    with pytest.raises(ForeignPatchError, match=r"test_patch\..*claims"):
        wrap("method")
    Toy.method = METHOD  # type: ignore[method-assign]


def test_dropped_by_a_replacement_ours_is_missing_and_nothing_is_touched() -> None:
    installation = wrap("static", "method")
    ours = dict(vars(Toy))
    replacement = Toy.method = lambda self, x: "dropped"  # type: ignore[method-assign, assignment]
    assert list(installation.replacements()) == ["method"]
    refused(installation, ours, replacement, "lambda")


def test_two_installations_come_off_in_either_order() -> None:
    for first_off in (0, 1):
        both = [wrap("method"), wrap("method")]
        assert Toy().method(1) == "ours(ours(method 1))"
        restore([both.pop(first_off)])
        assert Toy().method(1) == "ours(method 1)"
        restore([both.pop()])
        assert vars(Toy)["method"] is METHOD
