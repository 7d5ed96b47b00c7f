"""Common parts of commands: how they are declared, the global flags, and how results are printed.

A command is a frozen record: its docstring is the help text, its fields are the parameters, records among them are
groups of parameters. The work is done by a function of another module, which is imported when the command runs: help
pages and errors in options need nothing of what commands need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, dataclass_transform, get_type_hints

import typer

from planner.documents.text import spell_rate
from runtime.errors import InputError

Record = TypeVar("Record")


def option(help: str, default: Any = None, *names: str, **how: Any) -> Any:
    """Return the field of a record that is an option; `names` and `how` are of `typer.Option`."""
    return field(default=default, metadata={"typer": typer.Option(*names, help=help, **how), "names": names})


def argument(help: str, default: Any = MISSING, **how: Any) -> Any:
    """Return the field of a record that is a positional argument; `how` is of `typer.Argument`."""
    return field(default=default, metadata={"typer": typer.Argument(help=help, **how), "positional": True})


def rate_option(help: str) -> Any:
    """Return the field of a record that is an option whose text ends in a rate."""
    return option(help, callback=_spelled)


def _spelled(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Return the rate as it is read, and print that where other programs read it differently."""
    spelled = None if value is None else spell_rate(value)
    if spelled != value:
        typer.echo(f"planner: {parameter.opts[0]} {value}: read as {spelled}", err=True)
    return spelled


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, argument, rate_option, field))
def options(record: type[Record]) -> type[Record]:
    """Make a class a record of parameters."""
    return dataclass(frozen=True, kw_only=True)(record)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, argument, rate_option, field))
def command(
    app: typer.Typer, module: str, function: str, *, name: str | None = None
) -> Callable[[type[Record]], type[Record]]:
    """Return a decorator that makes a class a record of parameters, and a command.

    Args:
        app: the application, or a group of commands.
        module: the module with the function, imported when the command runs.
        function: the name of the function that is called with the record.
        name: the command's name; default: the function's.
    """

    def register(record: type[Record]) -> type[Record]:
        record = options(record)

        def run(**given: Any) -> None:
            asked = _filled(record, given)  # raises what is wrong with options before anything is imported
            getattr(import_module(module), function)(asked)

        parameters = list(_parameters(record))
        run.__doc__ = record.__doc__
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name or function)(run)
        return record

    return register


def _parameters(record: Any) -> Iterator[Parameter]:
    hints = get_type_hints(record)
    for each in (each for each in fields(record) if each.init):
        hint = hints[each.name]
        if is_dataclass(hint):
            yield from _parameters(hint)
            continue
        hint = Annotated[hint, each.metadata["typer"]]
        default = Parameter.empty if each.default is MISSING else each.default
        yield Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _filled(record: Any, given: Mapping[str, Any]) -> Any:
    hints = get_type_hints(record)
    names = [each.name for each in fields(record) if each.init]
    return record(**{name: _filled(hints[name], given) if is_dataclass(hints[name]) else given[name] for name in names})


def completed(name: str) -> Callable[[str], list[str]]:
    """Return what a shell completes a parameter by: a function of `planner.cli.completion`, imported when it asks."""

    def complete(incomplete: str) -> list[str]:
        found: list[str] = getattr(import_module("planner.cli.completion"), name)(incomplete)
        return found

    return complete


FSDP2 = "fsdp2"


class Flags:
    """Global flags of this call."""

    as_json = False
    verbose = False


def chosen(record: Any) -> dict[str, Any]:
    """Return the parameters that are not at their defaults, by the names that users see."""
    found: dict[str, Any] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if is_dataclass(value):
            found |= chosen(value)
        elif value not in (each.default, None, "", []):
            name = each.name.upper() if "positional" in each.metadata else f"--{each.name.replace('_', '-')}"
            found[(each.metadata.get("names") or (name,))[-1]] = value
    return found


def for_fsdp2(record: Any, unsupported: Collection[str] = ()) -> bool:
    """Return whether a command's `parallel` asks for FSDP2.

    Args:
        record: the command.
        unsupported: names of parameters that do not go with it.

    Raises InputError: another way to train in parallel, or a parameter that does not go with this one.
    """
    parallel = record.parallel
    if parallel is None:
        return False
    if parallel != FSDP2:
        raise InputError(f"--parallel: found {parallel!r}, expected {FSDP2}, or nothing for gradients in buckets")
    given = chosen(record)
    for name in (name for name in unsupported if name in given):
        raise InputError(f"{name}: found {given[name]}, which is not built for --parallel fsdp2 yet; leave it out")
    return True


def split_items(name: str, text: str) -> list[str]:
    """Split the text of an option at its commas. Raises InputError where an item is empty."""
    found = [item.strip() for item in text.split(",")]
    if not all(found):
        raise InputError(f"{name}: found {text!r}, expected items separated by commas")
    return found


def split_names(text: str) -> list[str]:
    """Split a text at its commas, without empty items."""
    return [item.strip() for item in text.split(",") if item.strip()]


def printed_json(document: Callable[[], Any]) -> bool:
    """Print the machine-readable result, alone on standard output, if it is asked for, and return whether it is."""
    if Flags.as_json:
        typer.echo(json.dumps(document(), indent=1, allow_nan=False))
    return Flags.as_json
