"""A property that is computed when it is first read, and then kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_Value = TypeVar("_Value")


class cached_property(Generic[_Value]):  # named like the class of functools that it replaces
    """`functools.cached_property` without the lock that Python 3.11 holds for all instances of a class.

    A fork would copy that lock while another thread holds it, and the child would then wait for it forever. Without the
    lock, two threads that read the property at the same time may both compute its value.
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
        # the instance's own attribute hides this descriptor from the next read on
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
