"""A quicker Triton interpreter: it spends half its time on a search for the functions of `triton.language`."""

from functools import cache


def remember_builtins() -> None:
    """Let the interpreter search each module and class for built-in functions once, not at every call of a function.

    It replaces them while a kernel runs, and restores them afterwards: their names do not change. Triton versions that
    replace them in another way are left alone.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope") or interpreter._patch_builtin.__module__ == __name__:
        return
    is_builtin = interpreter.tl.core.is_builtin

    @cache
    def names(package: object) -> list[str]:
        return [name for name, member in interpreter.inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: object, *rest: object) -> None:
        for name in names(package):
            member = getattr(package, name)
            if is_builtin(member):  # not yet replaced
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._patch_builtin = patch_builtin
