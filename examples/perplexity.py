"""The table of held-out perplexity: rows are tenants' texts, columns are adapters and the base."""

import math
from collections.abc import Mapping, Sequence

from rich.table import Table

BASE = "base"

Row = Mapping[str, float]
"""Column (an adapter's name, or `base`) -> perplexity of the row's text."""


def perplexity(logprobs: Sequence[float]) -> float:
    """exp of the mean negative log-probability (natural log). Raises ValueError without any token."""
    if not logprobs:
        raise ValueError("perplexity of no tokens")
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def answer_part(token_logprobs: Sequence[float | None], text_offset: Sequence[int], num_chars: int) -> list[float]:
    """The log-probabilities of an answer of `num_chars` characters and of the end-of-turn token after it.

    `token_logprobs` and `text_offset` are those of a completion with `echo` whose prompt ends in that token. Counting
    back from there makes it the same whether or not a server counts special tokens as characters. Raises ValueError
    when the lists differ in length, or when a token of the answer has no log-probability, as a prompt's first has none.
    """
    start = text_offset[-1] - num_chars
    answer = [logprob for logprob, at in zip(token_logprobs, text_offset, strict=True) if at >= start]
    known = [logprob for logprob in answer if logprob is not None]
    if len(known) != len(answer):
        raise ValueError(f"a token after character {start} has no log-probability")
    return known


def losing_rows(matrix: Mapping[str, Row]) -> list[str]:
    """The tenants whose own adapter is not strictly better on their text than every other column."""
    return [tenant for tenant, row in matrix.items() if not wins(tenant, row)]


def wins(tenant: str, row: Row) -> bool:
    """Whether the tenant's own column is strictly lower than all others."""
    own = row[tenant]
    return all(own < value for column, value in row.items() if column != tenant)


def as_table(matrix: Mapping[str, Row]) -> Table:
    """The matrix for the terminal, the diagonal green where it wins and red where it does not."""
    table = Table(title="Held-out perplexity (lower is better)", caption="rows: whose text; columns: who reads it")
    table.add_column("text")
    columns = list(next(iter(matrix.values()), {}))
    for column in columns:
        table.add_column(column, justify="right")
    for tenant, row in matrix.items():
        table.add_row(tenant, *(cell(tenant, column, row) for column in columns))
    return table


def cell(tenant: str, column: str, row: Row) -> str:
    """One figure; only the diagonal has a colour."""
    text = f"{row[column]:.2f}"
    if column != tenant:
        return text
    return f"[bold green]{text}[/]" if wins(tenant, row) else f"[bold red]{text}[/]"
