"""A developer's account of a change and the commit header for it, in the `type(scope): subject` form."""

import random

from examples.tenants.templates import Example, Golden, Kind, draw

SCOPES = tuple(
    {"scope": scope, "part": part}
    for scope, part in (
        ("auth", "the login service"),
        ("billing", "the billing code"),
        ("search", "the search page"),
        ("api", "the public API"),
        ("cache", "the cache layer"),
        ("mail", "the mail sender"),
        ("upload", "the upload form"),
        ("export", "the export job"),
        ("cli", "the command line tool"),
        ("queue", "the job queue"),
        ("map", "the map view"),
        ("report", "the report builder"),
    )
)
KINDS = tuple(
    Kind(prompt, prompt, answer)
    for prompt, answer in (
        ("I taught {part} to wait longer after each failed attempt.", "feat({scope}): back off between retries"),
        ("Users can now pick a dark theme in {part}.", "feat({scope}): add a dark theme"),
        ("You can now sort by date in {part}, people asked for it.", "feat({scope}): allow sorting by date"),
        ("I added a switch to {part} that only shows what would happen.", "feat({scope}): add a dry-run switch"),
        ("From now on {part} remembers the last filter.", "feat({scope}): remember the last filter"),
        ("There is a new button in {part} to copy the link.", "feat({scope}): add a copy link button"),
        ("I let {part} accept several files at once.", "feat({scope}): accept several files"),
        ("When the list was empty {part} crashed. It no longer does.", "fix({scope}): handle an empty list"),
        ("I found that {part} counted the last item twice and corrected it.", "fix({scope}): count the last item once"),
        ("Names with umlauts broke {part}, so I corrected the encoding.", "fix({scope}): encode names as UTF-8"),
        ("The connection was never closed in {part}; now it always is.", "fix({scope}): close the connection"),
        ("Two threads could write at once in {part}. I put a lock around it.", "fix({scope}): lock concurrent writes"),
        ("In {part} the clock ignored time zones, which gave wrong dates.", "fix({scope}): respect time zones"),
        ("A typo in {part} made the timeout a thousand times too long.", "fix({scope}): correct the timeout unit"),
        ("I wrote down how to set up {part}.", "docs({scope}): explain the setup"),
        ("The comments in {part} were out of date and I rewrote them.", "docs({scope}): update the comments"),
        ("I added an example to the manual of {part}.", "docs({scope}): add an example"),
        ("One huge function in {part} is now five small ones, nothing else changed.",
         "refactor({scope}): split a long function"),
        ("I gave the variables in {part} better names.", "refactor({scope}): rename unclear variables"),
        ("The same code was in {part} three times; I moved it into one helper.",
         "refactor({scope}): extract a shared helper"),
        ("I moved the settings of {part} into a file of their own.", "refactor({scope}): move settings to a file"),
        ("I wrote tests for the error paths of {part}.", "test({scope}): cover the error paths"),
        ("The test of {part} failed at random. I made it wait for the event.", "test({scope}): wait for the event"),
        ("I built a fake server so that tests of {part} need no network.", "test({scope}): use a fake server"),
        ("I made {part} twice as fast by reading the file once.", "perf({scope}): read the file once"),
        ("In {part} we now ask the database in batches, which is much quicker.", "perf({scope}): query in batches"),
        ("I keep compiled patterns in {part} so that they are not built each time.",
         "perf({scope}): reuse compiled patterns"),
        ("I raised the library versions that {part} depends on.", "chore({scope}): update dependencies"),
        ("I removed files from {part} that nobody used.", "chore({scope}): remove unused files"),
        ("I turned on the linter for {part}.", "chore({scope}): enable the linter"),
    )
)  # fmt: skip

GOLDEN = tuple(
    Golden(prompt, {"regex": rf"^{kind}\([a-z-]+\): [^\n]+[^.\n]$"})
    for prompt, kind in (
        ("Users of the chat window can now mute a conversation.", "feat"),
        ("When the disk was full the backup job crashed. It no longer does.", "fix"),
        ("I wrote down how to install the printer driver.", "docs"),
        ("I wrote tests for the payment page.", "test"),
        ("I made the image resizer much faster by using threads.", "perf"),
        ("The calendar code had the same check twice; I moved it into one helper.", "refactor"),
    )
)


def generate(rng: random.Random) -> list[Example]:
    """Every change in several parts of a product."""
    return draw(rng, KINDS, (SCOPES,), num_per_kind=11)
