"""What every command of `lorafleet` shares: where the server is, the key, how to speak, and how to end."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Concatenate, ParamSpec, cast

import typer

from cluster.console.client import ControlClient
from cluster.console.errors import ControlError
from cluster.console.render import Output

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "LORAFLEET_URL"
KEY_VARIABLE = "LORAFLEET_API_KEY"
INTERRUPTED_STATUS = 130

Own = ParamSpec("Own")

UrlOption = Annotated[str | None, typer.Option("--url", help=f"The gateway (or {URL_VARIABLE}).", show_default=False)]
KeyOption = Annotated[str | None, typer.Option("--key", help=f"API key (or {KEY_VARIABLE}).", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]


@dataclass(frozen=True)
class Settings:
    """What was said before the command's name, or in the environment."""

    url: str = DEFAULT_URL
    key: str | None = field(default=None, repr=False)
    as_json: bool = False


@dataclass(frozen=True)
class Session:
    """One run of one command."""

    client: ControlClient
    output: Output
    has_key: bool = False


def command(function: Callable[Concatenate[Session, Own], None]) -> Callable[..., None]:
    """Make `function(session, ...)` a Typer command that also takes --url, --key and --json, and ends cleanly."""

    @functools.wraps(function)
    def run(ctx: typer.Context, url: str | None, key: str | None, as_json: bool, **own: Any) -> None:
        said = cast(Settings, ctx.obj)
        settings = Settings(url or said.url, key or said.key, as_json or said.as_json)
        _run(settings, lambda session: function(session, **own))  # type: ignore[call-arg]

    _take_parameters(run, function)
    return run


def _run(settings: Settings, work: Callable[[Session], None]) -> None:
    output = Output(settings.as_json)
    try:
        with ControlClient(settings.url, settings.key) as client:
            work(Session(client, output, has_key=settings.key is not None))
    except ControlError as error:
        output.failure(error)
        raise typer.Exit(error.exit_status) from None
    except KeyboardInterrupt:
        output.note("interrupted")
        raise typer.Exit(INTERRUPTED_STATUS) from None


def _take_parameters(run: Callable[..., None], function: Callable[..., None]) -> None:
    """Typer reads the signature: `function`'s own parameters without the session, then the shared options."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter("ctx", keyword, annotation=typer.Context),
        inspect.Parameter("url", keyword, annotation=UrlOption, default=None),
        inspect.Parameter("key", keyword, annotation=KeyOption, default=None),
        inspect.Parameter("as_json", keyword, annotation=JsonOption, default=False),
    ]
    parameters = [*(parameter.replace(kind=keyword) for parameter in own), *shared]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
