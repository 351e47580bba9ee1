"""Properties that are computed when they are first asked for, and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_Value = TypeVar("_Value")


class cached_property(Generic[_Value]):  # it stands for functools' own
    """`functools.cached_property` without the lock that Python 3.11 holds for all instances of a class.

    A fork would copy that lock while another thread holds it, and the child would wait for it for ever. Two threads
    that ask at once may compute the value twice.
    """

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[_Value]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> _Value: ...
    def __get__(self, instance: object | None, owner: type) -> _Value | cached_property[_Value]:
        if instance is None:
            return self
        # the instance's own attribute goes before this one the next time
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
