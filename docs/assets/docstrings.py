"""What the reference needs of the packages, as griffe reads them without importing them."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Docstrings in the form of griffe, functions that have the name of their module, fields of Linen layers."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Tells the parser that `Example:` is a section, and sets off the line that names a source."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^Source: ", "**Source:** ", text, flags=re.MULTILINE)

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Gives a Linen layer that replaces none the signature of the constructor that Flax makes of its fields."""
        if "nn.Module" not in map(str, cls.bases):
            return
        fields = [member for member in cls.members.values() if member.is_attribute and member.annotation]
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*map(_parameter, fields))))

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Finds under `ejlayers.swap` the function, as Python does, where griffe finds the module of that name."""
        found = {name: _behind(pkg[name]) for name, path in pkg.imports.items() if path.startswith(f"{pkg.name}.")}
        for name, target in found.items():  # all are found before the first module is out of reach
            if target.is_module and name in target.members:
                pkg.members[name] = griffe.Alias(name, _behind(target[name]), parent=pkg)


def _behind(member: griffe.Object | griffe.Alias) -> griffe.Object:
    return member.final_target if isinstance(member, griffe.Alias) else member


def _parameter(field: griffe.Attribute) -> griffe.Parameter:
    """A field as a parameter; `dataclasses.field(default=None, kw_only=True)` is one that has a name in calls."""
    kind, default = griffe.ParameterKind.positional_or_keyword, field.value
    given = {a.name: a.value for a in getattr(default, "arguments", ()) if isinstance(a, griffe.ExprKeyword)}
    if "kw_only" in given:
        kind, default = griffe.ParameterKind.keyword_only, given["default"]
    return griffe.Parameter(field.name, annotation=field.annotation, kind=kind, default=default)
