"""Search for changes that make the shapes of a call fit, and rank them by likelihood.

A fix is kept only if all shapes fit after it; fixes of few tensors by likely rewrites come first.
If there is none, the sizes contradict each other, and the error says which.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import NamedTuple

from .rewrites import Rewrite, Words, is_batch, is_heads, rewrites, sharing
from .signature import Signature, Sizes, no_rule
from .words import Shape, ShapeError, in_words

_MOST = 6.0  # fixes that cost more are not reported
_AS_LIKELY = 0.5  # other fixes are reported if they cost at most this much more
_NO_BROADCAST = "take the entries that belong together, nothing is broadcast"


class ShapeProblem(NamedTuple):
    """The shapes of a call, its possible signatures, and the sizes that are known."""

    shapes: Mapping[str, Shape]
    forms: Sequence[Signature]  # the first one is for the options as passed
    sizes: Mapping[str, int] = {}
    source: str = ""  # where these sizes come from
    exchanges: Sequence[tuple[str, str]] = ()  # often swapped, the first pair most
    parameters: Sequence[str] = ()  # more likely wrong than the data
    advice: Mapping[str, str] = {}  # what to do if an axis has a wrong size
    hints: Mapping[str, Shape] = {}  # of masks and lengths; they only help choose between fixes

    def fits(self) -> bool:
        """Return whether all shapes fit a signature that the options allow."""
        return any(
            not form.options and form.with_tensors(self.shapes, self.sizes) is not None
            for form in self.forms
        )

    def has_axes(self) -> bool:
        """Return whether some signature has these numbers of axes."""
        return any(
            all(len(form.axes[name]) == len(shape) for name, shape in self.shapes.items())
            for form in self.forms
        )

    def without_rules(self) -> "ShapeProblem":
        """Return the problem without rules except that equal words have equal sizes."""
        return self._replace(forms=[form._replace(rule=no_rule) for form in self.forms])

    def repaired(self) -> ShapeError | None:
        """Return the error with a fix of axes or options that makes the shapes fit, if any."""
        found = _found(self) or _found(self._replace(hints={}))
        return _repaired(self, found) if found else None

    def error(self) -> ShapeError:
        """Return the error about shapes that do not fit."""
        return self.repaired() or _contradicted(self) or _contradicted(self.without_rules())


class _Fix(NamedTuple):
    """Code for each tensor that changes, the shapes after it, and the axes it assumes."""

    cost: float
    form: Signature
    code: dict[str, str]
    shapes: dict[str, Shape]
    readings: dict[str, Words]

    @property
    def is_exchange(self) -> bool:
        """Whether two tensors are swapped."""
        codes = [code.removesuffix(".T") for code in self.code.values()]
        return len(codes) == 2 and list(self.code) == codes[::-1]

    @property
    def adds_copies(self) -> bool:
        """Whether a tensor is repeated along a new axis."""
        return any(code.startswith("np.repeat") and "None" in code for code in self.code.values())

    @property
    def fix(self) -> str:
        """The fix in one line."""
        steps = list(self.code.values())
        fix = f"use {', '.join(steps[:-1])}{' and ' * (len(steps) > 1)}{steps[-1]}" if steps else ""
        if self.is_exchange:
            fix = f"exchange {' and '.join(steps[::-1])}"
        return " and ".join(filter(None, (fix, self.form.advice)))

    @property
    def sharing(self) -> str:
        """The condition under which repeating tensors is right."""
        return sharing(self.code, self.form.axes)

    @property
    def condition(self) -> str:
        """The axes that the tensors must have for the fix to be right."""
        readings = self.readings or dict([next(iter(self.form.axes.items()))])
        return " and ".join(f"{name} is {in_words(axes)}" for name, axes in readings.items())


def _found(call: ShapeProblem) -> list[_Fix]:
    """Return the likeliest fixes, several only if the sizes do not tell which is right."""
    found = list(_exchanges(call))
    best = min((repair.cost for repair in found), default=_MOST - _AS_LIKELY)
    for count in range(len(call.shapes) + 1):
        if (count + 1) / 2 > best + _AS_LIKELY:
            break
        for form in call.forms:
            for changed in combinations(call.shapes, count):
                for repair in _changing(call, form, changed, best + _AS_LIKELY - form.cost):
                    if repair.cost <= best + _AS_LIKELY:
                        found.append(repair)
                        best = min(best, repair.cost)
    likely: dict[str, _Fix] = {}
    for repair in sorted(found, key=lambda repair: repair.cost):
        if repair.cost <= best + _AS_LIKELY:
            likely.setdefault(repair.fix, repair)
    return list(likely.values())[:3]


def _exchanges(call: ShapeProblem) -> Iterator[_Fix]:
    """Yield the fixes that swap two tensors."""
    there = [pair for pair in call.exchanges if call.shapes.keys() >= set(pair)]
    for form in call.forms:
        for (unusual, (a, b)), turn in product(enumerate(there), ("", ".T")):
            step = -1 if turn else 1
            shapes = {**call.shapes, a: call.shapes[b][::step], b: call.shapes[a][::step]}
            sizes = form.with_tensors(shapes, call.sizes)
            if sizes is not None and (not turn or len(shapes[a]) == len(shapes[b]) == 2):
                cost = 2.5 + unusual / 2 + form.cost + form.against(call.hints, sizes)
                code = {a: b + turn, b: a + turn}
                yield _Fix(cost + 2 * bool(turn), form, code, shapes, {a: form.axes[b][::step]})


def _changing(
    call: ShapeProblem, form: Signature, changed: tuple[str, ...], limit: float
) -> Iterator[_Fix]:
    """Yield the fixes that change exactly these tensors and cost at most `limit`."""
    kept = {name: shape for name, shape in call.shapes.items() if name not in changed}
    sizes = form.with_tensors(kept, call.sizes)
    for cost, steps in _steps(call, form, changed, sizes, limit) if sizes is not None else ():
        if steps or form.options:
            shapes = kept | {name: route.shape for name, route in steps.items()}
            doubt = form.against(call.hints, form.with_tensors(shapes, call.sizes))
            yield _Fix(
                cost + form.cost + doubt + _doubt(call, form, steps),
                form,
                {name: route.code for name, route in steps.items()},
                shapes,
                {name: route.reading for name, route in steps.items()},
            )


def _doubt(call: ShapeProblem, form: Signature, steps: dict[str, Rewrite]) -> float:
    """Return the penalty for changing every tensor: nothing unchanged then confirms the fix."""
    if len(steps) < max(len(call.shapes), 2):
        return 0
    turned = any(
        "reshape" not in route.code and route.reading[-1:] != form.axes[name][-1:]
        for name, route in steps.items()
    )
    columns_first = all(route.code.endswith(".swapaxes(-1, -2)") for route in steps.values())
    return 4 if turned and not call.sizes and not (columns_first and len(steps) > 2) else 1.5


def _steps(
    call: ShapeProblem, form: Signature, names: tuple[str, ...], sizes: Sizes, limit: float,
    taken: tuple[str, ...] = (),
) -> Iterator[tuple[float, dict[str, Rewrite]]]:  # fmt: skip
    """Yield rewrites of all these tensors to shapes that fit, with their total cost."""
    if not names:
        yield 0, {}
        return
    name, *rest = names
    shape, axes = call.shapes[name], form.axes[name]
    known = {w: n for w in axes if (n := form.size_of(w, sizes)) is not None}
    known |= {w: sizes[w] for w in ("heads", "d_qk") if w in sizes}
    for route in rewrites(name, shape, axes, known, call.has_axes()):
        slip = re.sub(rf"\b{name}\b|(?<=reshape)\(.*?\)", "", route.code)
        cost = 0.5 if slip in taken else route.cost  # the same mistake again is likely
        after = form.with_tensors({name: route.shape}, sizes)
        if after is None or cost + len(rest) / 2 > limit:
            continue
        for more, steps in _steps(call, form, tuple(rest), after, limit - cost, (*taken, slip)):
            yield cost + more, {name: route} | steps


def _repaired(call: ShapeProblem, found: list[_Fix]) -> ShapeError:
    """Return the error with its fixes."""
    best = found[0]
    if names := [name for name in call.shapes if name in best.code]:
        tensor, right = names[0], best.shapes[names[0]]
        what = _difference(call, best.form, tensor, right, set(names))
    else:
        tensor, what = _clash(call)
        right = call.shapes[tensor]
    other = _contradicted(call)
    is_guess = best.adds_copies and call.has_axes() and other is not None
    several = len(found) > 1 or is_guess
    conditions = [
        " and ".join(filter(None, (r.condition if several else "", r.sharing))) for r in found
    ]
    fixes = [f"{r.fix} if {c}" if c else r.fix for r, c in zip(found, conditions, strict=True)]
    if is_guess:
        return ShapeError(other.args[0], ", or ".join([other.fix, *fixes]), *other.args[2:])
    is_bold = best.is_exchange or len(best.code) == len(call.shapes)
    if is_bold and other and other.fix.startswith("project one"):
        fixes.append(other.fix)  # it is as likely that the size of one tensor is wrong
    changes = {name: best.shapes[name] for name in names} | dict(best.form.options)
    axes = in_words(best.form.axes[tensor])
    return ShapeError(
        what, ", or ".join(fixes), tensor, call.shapes[tensor], right, axes, changes, best.code
    )


def _difference(
    call: ShapeProblem, form: Signature, tensor: str, right: Shape, changed: set[str]
) -> str:
    """Return the message about a tensor's wrong axis and the tensor that contradicts it."""
    shape, words = call.shapes[tensor], form.axes[tensor]
    others = [f"{name} {other}" for name, other in call.shapes.items() if name != tensor]
    remark = f" ({', '.join(others)})" if others else ""
    if len(shape) != len(words):
        count = f"{len(shape)} ax{'i' if len(shape) == 1 else 'e'}s"
        return (
            f"{tensor}: shape {shape} has {count}, expected {len(words)} "
            f"{in_words(form.axes[tensor])}{remark}"
        )
    wrong = [axis for axis in zip(words, shape, right, strict=True) if axis[1] != axis[2]]
    for word, got, n in wrong:
        said = _who_says(call, form, word, changed)
        if said:
            other, theirs, other_shape = said
            both = f"{tensor} {shape}, axes {in_words(form.axes[tensor])}"
            if other_shape is not None:
                both = f"{other} {other_shape}, {both}"
            have = "have" if other.endswith("keys") or other in ("values", "scores") else "has"
            return f"{tensor}: {word} is {got} but {other} {have} {theirs} {n} ({both})"
    if wrong:
        shown = f"expected {right} {in_words(form.axes[tensor])}"
    else:
        shown = "in the place of another"
    return f"{tensor}: shape {shape}, {shown}{remark}"


def _who_says(
    call: ShapeProblem, form: Signature, word: str, changed: set[str]
) -> tuple[str, str, Shape | None] | None:
    """Return an unchanged tensor that has this axis, its word for the axis, and its shape."""
    same = form.same.get(word, word)
    if same in call.sizes:
        return call.source, word, None
    for other in sorted(call.shapes, key=call.parameters.__contains__):
        words = form.axes[other]
        if other not in changed and len(words) == len(call.shapes[other]):
            for theirs in words:
                if form.same.get(theirs, theirs) == same:
                    return other, theirs, call.shapes[other]
    return None


def _clash(call: ShapeProblem) -> tuple[str, str]:
    """Return the first tensor that does not fit those before it, and the message about it."""
    form, sizes = call.forms[0], call.sizes
    for tensor, shape in call.shapes.items():
        after = form.with_tensors({tensor: shape}, sizes)
        if after is None and len(shape) == len(form.axes[tensor]):
            rest = list(call.shapes)
            right = tuple(
                n if (n := form.size_of(w, sizes)) is not None else got
                for w, got in zip(form.axes[tensor], shape, strict=True)
            )
            later = set(rest[rest.index(tensor) + 1 :])
            return tensor, _difference(call, form, tensor, right, later)
        sizes = sizes if after is None else after
    shapes = ", ".join(f"{name} {shape}" for name, shape in call.shapes.items())
    return next(iter(call.shapes)), f"{next(iter(call.shapes))}: shapes do not fit ({shapes})"


def _contradicted(call: ShapeProblem) -> ShapeError | None:
    """Return the error about sizes that contradict each other, changing the fewest tensors."""
    order = [name for name in (*call.parameters, *reversed(call.shapes)) if name in call.shapes]
    order = list(dict.fromkeys(order))
    best, least = None, 99.0
    for form in call.forms:
        for count in range(1, len(order) + 1):
            for changed in combinations(order, count) if not form.options else ():
                cost, right = _resized(call, form, changed)
                if cost < least:
                    best, least = (form, right), cost
    if best is None:
        return None
    form, right = best
    changed = [name for name in call.shapes if name in right]
    tensor = changed[0]
    what = _difference(call, form, tensor, right[tensor], set(changed))
    fix = _advice(call, form, tensor, right[tensor], set(changed))
    axes = in_words(form.axes[tensor])
    return ShapeError(what, fix, tensor, call.shapes[tensor], right[tensor], axes, right)


def _resized(
    call: ShapeProblem, form: Signature, changed: Sequence[str]
) -> tuple[float, dict[str, Shape]]:
    """Return the cost of changing these tensors, and their shapes if all others are right."""
    kept = {name: shape for name, shape in call.shapes.items() if name not in changed}
    sizes = form.with_tensors(kept, call.sizes)
    cost, right = float(len(changed)), {}
    for name in (n for n in call.shapes if n in changed):
        if sizes is None:
            return 99.0, {}
        shape, words = call.shapes[name], form.axes[name]
        cost += abs(len(shape) - len(words))
        own = ((1,) * len(words) + shape)[len(shape) :] if words else ()
        known = [form.size_of(word, sizes) for word in words]
        new = tuple(m if n is None else n for n, m in zip(known, own, strict=True))
        if name == "query" and any(
            is_heads(w) and n != m for w, n, m in zip(words, new, own, strict=True)
        ):
            cost += 1.5  # wrong query heads are less likely
        right[name] = new
        sizes = form.with_tensors({name: new}, sizes)
    cost += form.against(call.hints, sizes)
    return (99.0, {}) if sizes is None else (cost, right)


def _advice(
    call: ShapeProblem, form: Signature, tensor: str, right: Shape, changed: set[str]
) -> str:
    """Return what the caller can do if no change of axes helps."""
    shape, words = call.shapes[tensor], form.axes[tensor]
    if len(shape) != len(right):
        kept = {name: s for name, s in call.shapes.items() if name not in changed}
        sizes = form.with_tensors(kept, call.sizes) or {}
        sized = [form.size_of(word, sizes) for word in words]
        as_known = tuple(w if n is None else str(n) for w, n in zip(words, sized, strict=True))
        return f"make it {', '.join(dict.fromkeys(map(in_words, (as_known, words))))}"
    wrong = [axis for axis in zip(words, shape, right, strict=True) if axis[1] != axis[2]]
    word, got, n = wrong[0]
    if word in call.advice:
        return call.advice[word].format(tensor=tensor, got=got, n=n, right=right)
    if is_batch(word):
        return _NO_BROADCAST
    if is_heads(word):
        of_query = "n_heads must be n_kv_heads, or a multiple of it with enable_gqa=True"
        return "key and value have the same heads" if tensor == "value" else of_query
    if not word.startswith("d") or len(shape) == 1:
        return f"make it {right} {in_words(words)}"
    if tensor not in call.parameters:
        return f"project it, e.g. {tensor} @ P with P {(got, n)}"
    others = [name for name in call.shapes if name != tensor and word in form.axes[name]]
    if len(others) == len(wrong) == 1 and others[0] not in call.parameters:
        data = f"{others[0]} to {word} {got}, e.g. {others[0]} @ P with P {(n, got)}"
        return f"make it {right}, or bring {data}"
    return f"make it {right}"
