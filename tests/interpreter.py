"""Triton's interpreter, without what it does again and again: the kernels' tests take a third of the time.

- A kernel's launch looks through the whole language to put functions for numpy in the place of its own, and
  so does each call within it of another kernel, although all is in its place. Each of these functions goes
  through the keywords it is given, and is called by a wrapper that looks whether one was added.
- Of each sum of integers it computes whether it overflows, by a dozen operations of its own; the assertion
  that this is for does nothing unless the option `debug` is set, which it isn't.
- The shape of every value is checked, converted and printed anew, that with one more axis is, too, and so is
  the table of numpy's types.
- It looks for a common type and a common shape of any two values, though most are alike or seen before, and
  makes a tensor of the same number again and again.

It computes the same, and checks the same.
"""

import inspect
import math
from functools import cache
from typing import Any

import numpy as np

MOST_NUMBERS = 1024  # that are kept


def quicken() -> None:
    """Change this process's interpreter; nothing where kernels run on a GPU."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch_lang, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    sanitize = TritonSemantic.binary_op_sanitize_overflow_impl
    in_place: set[int] = set()  # modules of the language that a launch has changed and not yet restored
    named: dict[int, set[int]] = {}  # by the globals of a kernel: those that it calls

    def patch_once(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) not in named:
            modules = [value for value in names.values() if inspect.ismodule(value)]
            named[id(names)] = {id(module) for module in modules if module in (tl, tl.core)}
        if named[id(names)] and named[id(names)] <= in_place:
            return interpreter._LangPatchScope()
        in_place.update(named[id(names)])
        return patch_lang(fn)

    def restored(self: Any) -> None:
        """At the end of a launch; scopes of calls within it are never restored."""
        in_place.clear()
        restore(self)

    members: dict[int, list[str]] = {}  # by a module or class of the language: names of what is replaced

    @cache
    def interpreted(builtin: Any) -> Any:
        plain = inspect.unwrap(builtin)

        def call(*args: Any, _semantic: object = None, **options: Any) -> Any:
            return plain(*args, _semantic=interpreter.interpreter_semantic, **options)

        return call

    def patch_builtin(of: Any, builder: object, scope: Any) -> None:
        if id(of) not in members:
            members[id(of)] = [name for name, _ in inspect.getmembers(of, tl.core.is_builtin)]
        for name in members[id(of)]:
            if tl.core.is_builtin(member := getattr(of, name)):  # else it is in its place, or a test's
                scope.set_attr(of, name, interpreted(member))

    def unless_asserted(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        interpreted = isinstance(self.builder, interpreter.InterpreterBuilder)
        if not interpreted or self.builder.options.debug:
            sanitize(self, lhs, rhs, operation)

    made = tl.core.block_type.__init__
    # What `made` found of a shape, the beginning of its name, and what a tensor of it has: by the sizes, and
    # by the shape itself, which stays.
    shapes: dict[tuple[int, ...], tuple[Any, int, str, Any, Any]] = {}
    known: dict[int, tuple[Any, int, str, Any, Any]] = {}

    @cache
    def constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
        """A tensor's shape and how many elements it has, as the language has them."""
        return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    def block_of(self: Any, element: Any, shape: Any) -> None:
        found = known.get(id(shape))
        if found is None:
            values = shape.values if isinstance(shape, tl.core.tuple) else shape
            key = tuple([each.value if isinstance(each, tl.constexpr) else each for each in values])
            if key not in shapes:
                made(self, element, shape)
                found = (self.shape, self.numel, f"<{self.shape}, ", *constants(key))
                shapes[key] = known[id(self.shape)] = found
            found = shapes[key]
        self.element_ty = element
        self.shape, self.numel, name, *_ = found
        self.name = f"{name}{element}>"

    def tensor_of(self: Any, handle: Any, kind: Any) -> None:
        super(tl.tensor, self).__init__()
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        if kind.is_block():
            *_, self.shape, self.numel = known[id(kind.shape)]
        else:
            self.shape, self.numel = constants(())

    looked_up = interpreter._get_np_dtype
    types: dict[str, np.dtype[Any]] = {}  # by the name of the type of one element; a pointer has no hash

    def numpys(kind: Any) -> np.dtype[Any]:
        name = kind.scalar.name
        if name not in types:
            types[name] = looked_up(kind)
        return types[name]

    common = TritonSemantic.binary_op_type_checking_impl
    numbers: dict[
        tuple[object, ...], tl.tensor
    ] = {}  # beside a tensor of such a type and shape: as one of it

    def alike(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        interpreted = isinstance(self.builder, interpreter.InterpreterBuilder)  # else it is compiled
        if interpreted and type(lhs) is tl.tensor and lhs.dtype.name in COMMON:
            if type(rhs) is tl.tensor:
                if lhs.dtype is rhs.dtype:
                    return (lhs, rhs) if lhs.shape is rhs.shape else made_compatible(self, lhs, rhs)
            elif type(rhs) in (int, float):
                key = lhs.dtype.name, id(lhs.shape), type(rhs), rhs, arithmetic_check
                if key not in numbers:
                    left, right = common(
                        self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
                    )
                    if left is not lhs or right.shape is not lhs.shape:
                        return left, right
                    if len(numbers) >= MOST_NUMBERS:
                        numbers.clear()
                    numbers[key] = right
                return lhs, numbers[key]
        made: tuple[Any, Any] = common(
            self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )
        return made

    cast, expand_dims = TritonSemantic.cast, TritonSemantic.expand_dims

    def cast_unless(self: Any, value: Any, kind: Any, fp_downcast_rounding: Any = None) -> Any:
        if value.dtype is kind.scalar:
            return value
        return cast(self, value, kind, fp_downcast_rounding)

    expanded: dict[tuple[int, int], Any] = {}  # by a shape and the new axis

    def with_axis(self: Any, value: Any, axis: int) -> Any:
        if not isinstance(self.builder, interpreter.InterpreterBuilder) or not value.type.is_block():
            return expand_dims(self, value, axis)
        key = id(value.type.shape), axis
        if key not in expanded:
            made = expand_dims(self, value, axis)
            expanded[key] = made.type.shape
            return made
        handle = self.builder.create_expand_dims(value.handle, axis)
        return self.tensor(handle, tl.block_type(value.dtype, expanded[key]))

    compatible = TritonSemantic.broadcast_impl_value
    # By two shapes: what both are widened to; None where one has fewer axes.
    widest: dict[tuple[int, int], Any] = {}

    def widened(self: Any, value: Any, shape: Any) -> Any:
        if value.type.shape is shape:
            return value
        handle = self.builder.create_broadcast(value.handle, shape.values)
        return self.tensor(handle, tl.block_type(value.type.scalar, shape))

    def made_compatible(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if isinstance(self.builder, interpreter.InterpreterBuilder) and lhs.type.is_block():
            shape = lhs.type.shape
            if not rhs.type.is_block():  # a number beside a tensor
                kind = tl.block_type(rhs.type.scalar, shape)
                return lhs, self.tensor(self.builder.create_splat(kind, rhs.handle), kind)
            key = id(shape), id(rhs.type.shape)
            if key in widest:
                if (wide := widest[key]) is not None:
                    return widened(self, lhs, wide), widened(self, rhs, wide)
            else:
                same = len(shape) == len(rhs.type.shape)
                left, right = compatible(self, lhs, rhs)
                widest[key] = left.type.shape if same else None
                return left, right
        made: tuple[Any, Any] = compatible(self, lhs, rhs)
        return made

    # Of two of these nothing else comes, whatever is computed.
    COMMON = {each.name for each in (tl.int1, tl.int32, tl.int64, tl.float32)}
    TritonSemantic.binary_op_type_checking_impl = alike
    TritonSemantic.broadcast_impl_value = made_compatible
    TritonSemantic.cast, TritonSemantic.expand_dims = cast_unless, with_axis
    tl.core.block_type.__init__ = block_of
    tl.tensor.__init__ = tensor_of
    interpreter._get_np_dtype = numpys
    interpreter._patch_lang, interpreter._patch_builtin = patch_once, patch_builtin
    interpreter._LangPatchScope.restore = restored
    TritonSemantic.binary_op_sanitize_overflow_impl = unless_asserted
