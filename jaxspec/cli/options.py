"""Read command lines with tyro: nested dataclasses are groups of --help, bad input is one line."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from inspect import cleandoc, get_annotations, isfunction, signature
from pathlib import Path
from textwrap import fill, indent
from typing import Annotated, Any, NoReturn, get_type_hints

import tyro
from docstring_parser import parse
from tyro.constructors._struct_spec_dataclass import dataclass_rule

from jaxspec.command import input_errors, script_name
from jaxspec.errors import CLONE, InputError, nearest
from jaxspec.files import local_path

_WIDEST = 100
"""Maximum columns of a paragraph in --help."""


def run_script(main: Callable[..., object], description: str | None = None) -> None:
    """Run a script under `train/` or `eval/`; its options are the parameters of `main`.

    Args:
      description: Beginning of --help; by default the docstring of `main`.
    """
    name, marks = script_name(), (tyro.conf.FlagCreatePairsOff,)
    with input_errors(name):
        parse_options(main, sys.argv[1:], f"python -m {name}", description, marks)


def parse_options(
    kind: Any,
    arguments: Sequence[str],
    prog: str,
    description: str | None = None,
    config: Sequence[Any] = (),
    hidden: Sequence[str] = (),
    **settings: Any,
) -> Any:
    """Return what tyro makes of a command line; raise InputError where tyro would print a box.

    The `~` of paths is expanded.

    Args:
      kind: Dataclass whose fields are the options, or function whose parameters they are.
      prog: The command's name in --help.
      description: Beginning of --help; by default the docstring of `kind`.
      config: Markers of `tyro.conf` for all options.
      hidden: Names of fields that --help leaves out.
      settings: More arguments of `tyro.cli`.
    """
    settings |= {
        "prog": prog,
        "description": "",  # tyro would not wrap it
        "config": (*config, tyro.conf.PositionalMetavarFromFieldName),
        "registry": _registry(tyro.conf.FlagCreatePairsOff not in config, hidden),
    }

    def options() -> list[str]:
        page = io.StringIO()
        with redirect_stdout(page), suppress(SystemExit):
            tyro.cli(kind, args=["--help"], **settings)
        lines = re.findall(r"^\W*(--.*)", page.getvalue(), re.MULTILINE)
        return [name for line in lines for name in re.findall(r"--[\w.-]+", line)]

    def refuse(event: Any) -> NoReturn:
        raise InputError(_refusal(event, arguments, options, f"see {prog} --help"))

    if {"-h", "--help"} & set(arguments):
        print(f"{paragraphs(description or kind.__doc__ or '')}\n")
    with tyro._errors.on_parse_error(refuse):
        return tyro.cli(kind, args=arguments, **settings)


def parse_subcommand(
    kinds: Mapping[str, Any], arguments: Sequence[str], prog: str, description: str | None
) -> Any:
    """Return what `parse_options` makes of the arguments after a subcommand, one of `kinds`.

    `help NAME` is `NAME --help`; no arguments are `--help`.
    """
    name, *options = arguments or [""]
    if name == "help":
        name, *options = [*options, "--help"]
    if name in kinds:
        marks = tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff
        return parse_options(kinds[name], options, f"{prog} {name}", config=marks)
    if name in ("", "-h", "--help"):
        print(f"{paragraphs(description or '')}\n\nusage: {prog} COMMAND [OPTIONS]\n")
        print(listing({name: kind.__doc__ for name, kind in kinds.items()}))
        print(f"\n{prog} help COMMAND lists the options of a command.")
        sys.exit(0)
    raise InputError(f"command {name!r}: unknown; {nearest(name, list(kinds))}")


def paragraphs(text: str) -> str:
    """Return a docstring whose paragraphs fill the terminal.

    Examples stay as they are: paragraphs that are indented, or begin with "$ ".
    """

    def paragraph(block: str) -> str:
        if block.startswith("$ "):
            return indent(re.sub(r"^\$ ", "", block, flags=re.MULTILINE), "    ")
        return block if block.startswith(" ") else _filled(block)

    return "\n\n".join(map(paragraph, re.split(r"\n\s*\n", cleandoc(text))))


def listing(docstrings: Mapping[str, str | None]) -> str:
    """Return a paragraph for each name: the first sentence of its docstring."""
    column = 4 + max(map(len, docstrings))
    sentences = {
        name: re.split(r"(?<=\.)\s", cleandoc(text or ""), maxsplit=1)[0]
        for name, text in docstrings.items()
    }
    return "\n".join(_filled(sentence, f"  {name}", column) for name, sentence in sentences.items())


def _filled(text: str, first: str = "", column: int = 0) -> str:
    """Return a paragraph as wide as the terminal, behind a column that begins with `first`."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    return fill(
        " ".join(text.split()),
        width,
        initial_indent=first.ljust(column),
        subsequent_indent=" " * column,
        break_on_hyphens=False,
    )


def _registry(pairs: bool, hidden: Sequence[str]) -> Any:
    """Return tyro's registry with the rules of all commands, for paths and for help texts.

    Args:
      pairs: Whether a flag that is set by default has a form that sets it, too.
      hidden: Names of fields that --help leaves out.
    """

    def path_rule(info: Any) -> Any:
        spec = tyro.constructors.PrimitiveConstructorSpec
        if info.type is Path:
            return spec(
                1,
                "PATH",
                lambda x: local_path(*x),
                lambda x: isinstance(x, Path),
                lambda x: [str(x)],
            )
        return None

    def default(value: str) -> str:
        unsaid = ("None", "False", "", "''", *["True"] * (not pairs))
        return "" if value in unsaid else f"(default: {value.replace(f'{CLONE}/', '')})"

    def joined(text: Any) -> str | None:
        return text and " ".join(text.split())

    def option(field: Any) -> Any:
        """Return an option without the source's line breaks, and defaults that say nothing."""
        text = field.helptext
        marks: list[Any] = [tyro.conf.DisallowNone] * (field.default is None)
        marks += [tyro.conf.Suppress] * (field.name in hidden)
        return replace(
            field,
            type=Annotated[(field.type, tyro.conf.arg(help_behavior_hint=default), *marks)],
            helptext=lambda: joined(text() if callable(text) else text),
        )

    def parameters(function: Any) -> Any:
        """Return the specification of a function, whose docstring describes its parameters."""
        texts = {text.arg_name: text.description for text in parse(function.__doc__ or "").params}
        hints = get_type_hints(function, include_extras=True)
        fields = [
            tyro.constructors.StructFieldSpec(
                name,
                hints[name],
                tyro.MISSING_NONPROP if parameter.default is parameter.empty else parameter.default,
                texts.get(name),
            )
            for name, parameter in signature(function).parameters.items()
        ]
        return tyro.constructors.StructConstructorSpec(function, tuple(fields))

    def struct_rule(info: Any) -> Any:
        spec = parameters(info.type) if isfunction(info.type) else dataclass_rule(info)
        if spec is None:
            return None
        # A class's options come before those of its bases.
        bases = [get_annotations(base) for base in getattr(info.type, "__mro__", ())]
        fields = sorted(spec.fields, key=lambda field: [field.name not in base for base in bases])
        return replace(spec, fields=tuple(map(option, fields)))

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(path_rule)
    registry.struct_rule(struct_rule)
    return registry


def _refusal(
    event: Any, arguments: Sequence[str], options: Callable[[], list[str]], advice: str
) -> str:
    """Return the line for a `tyro._errors.ParseErrorEvent`.

    Args:
      arguments: The command line.
      options: Returns the names of all options.
      advice: What to do where nothing better is known.
    """
    argument = getattr(event, "argument", None)
    name = argument and argument.display_name()
    match type(event).__name__:
        case "UnrecognizedArgs":
            return _unknown(event.tokens, arguments, options, advice)
        case "MissingArgs":
            if any(token.startswith("-") for token in event.unrecognized_tokens):
                return _unknown(event.unrecognized_tokens, arguments, options, advice)
            names = ", ".join(context.arg.display_name() for context in event.missing_arguments)
            return f"{names}: missing; {advice}"
        case "InvalidChoice":
            choices = [choice for choice in event.choices if choice != "None"]
            return f"{name}: {event.value!r}; {nearest(event.value, choices)}"
        case "BadValue":
            return f"{name}: the value is missing; give {_noun(argument)}"
        case "InstantiationFailure" if values := name and re.findall("'.*'", event.message):
            if "://" in values[0]:
                return (
                    f"{name}: {values[0]}: a web address; fetch it, and give the file or directory"
                )
            return f"{name}: {values[0]}; give {_noun(argument)}"
    return str(getattr(event, "message", f"{type(event).__name__}; {advice}"))


def _unknown(
    tokens: Sequence[str], arguments: Sequence[str], options: Callable[[], list[str]], advice: str
) -> str:
    """Return the line for the arguments of a command line that nothing takes."""
    for token in tokens:
        if token.startswith("-"):
            name = token.partition("=")[0]
            # A group's flag has its "no" behind the group: --head.no-slot-bias.
            form = re.sub(r"^--no-([\w.-]+\.)", r"--\1no-", name.replace("_", "-"))
            return f"{name}: no such option; {nearest(form, options(), advice)}"
    token = tokens[0]
    indices = [index for index, word in enumerate(arguments) if word == token]
    before = [(["", "", *arguments][index], ["", *arguments][index]) for index in indices]
    for option, value in before:  # as b in --image a b
        if option.startswith("--") and not value.startswith("--"):
            mend = "quote a value with spaces, or repeat the option"
            return f"{option}: takes one value, and {value!r}, {token!r} are two; {mend}"
    flags = [word.removesuffix(f"={token}") for word in arguments if word.endswith(f"={token}")]
    flags += [flag for _, flag in before if flag.startswith("--") and "=" not in flag]
    if flags:  # as --tiles yes and --tiles=yes
        return f"{flags[0]}: takes no value; leave out {token!r}"
    return f"{token!r}: nothing takes it; {advice}"


def _noun(argument: Any) -> str:
    """Return what an argument takes: a whole number, numbers, or tyro's word for it."""
    metavar: str = argument.lowered.metavar.removeprefix("{None}|").strip("{}")
    kinds = {"INT": "a whole number", "FLOAT": "a number", "STR": "one", "PATH": "a path"}
    lists = {"[INT [INT ...]]": "whole numbers", "[FLOAT [FLOAT ...]]": "numbers"}
    choices, _, other = metavar.rpartition("}|")  # as in {auto}|INT
    kind = (kinds | lists).get(other, other)
    return f"{choices} or {kind}" if choices else kind
