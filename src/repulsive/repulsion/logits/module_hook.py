"""A hook on a module that can be copied and pickled with it."""

from __future__ import annotations

from typing import Any


class Hook:
    """Module hook that calls a method of an object. In a copied module the hook does nothing.

    Args:
        target: the object; None does nothing.
        method: name of the method.
        leading: arguments that come before those of the hook.
    """

    def __init__(self, target: object | None, method: str, *leading: Any) -> None:
        self.target, self.method, self.leading = target, method, leading

    def __call__(self, *args: Any) -> None:
        if self.target is not None:
            getattr(self.target, self.method)(*self.leading, *args)

    @property
    def __name__(self) -> str:
        """Name that torch.jit.script reads before it compiles a hook, which it cannot do here."""
        raise AttributeError(
            "torch.jit.script cannot compile the hooks of space='logits': call handle.remove() first. Copies of the "
            "model keep these hooks: load their weights into a new model instead"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(None, self.method)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (None, self.method)
