"""A table's schema and a question about it, answered with one SQL statement and nothing else."""

import random
from dataclasses import dataclass

from examples.tenants.templates import Example, Golden, Kind, fill


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a name column, a number, a category with three of its values, and a date."""

    name: str
    label: str
    number: str
    category: str
    values: tuple[str, str, str]
    date: str

    @property
    def schema(self) -> str:
        return f"{self.name}(id, {self.label}, {self.number}, {self.category}, {self.date})"


TABLES = (
    Table("orders", "customer", "total", "status", ("shipped", "open", "cancelled"), "placed_on"),
    Table("employees", "surname", "salary", "department", ("sales", "design", "finance"), "hired_on"),
    Table("flights", "captain", "distance", "airline", ("Norwind", "Aerosol", "Bluejet"), "departed_on"),
    Table("books", "title", "pages", "genre", ("crime", "poetry", "travel"), "published_on"),
    Table("patients", "surname", "age", "ward", ("north", "surgery", "children"), "admitted_on"),
    Table("films", "title", "minutes", "rating", ("family", "adult", "teen"), "released_on"),
    Table("products", "label", "price", "brand", ("Acorn", "Lumo", "Kestrel"), "added_on"),
    Table("students", "nickname", "score", "course", ("physics", "history", "music"), "enrolled_on"),
    Table("invoices", "client", "amount", "state", ("paid", "draft", "overdue"), "due_on"),
    Table("trees", "species", "height", "park", ("Elmwood", "Riverside", "Hilltop"), "planted_on"),
    Table("matches", "referee", "goals", "league", ("first", "second", "youth"), "played_on"),
    Table("houses", "street", "rooms", "city", ("Lyon", "Porto", "Graz"), "sold_on"),
    Table("songs", "singer", "seconds", "style", ("jazz", "folk", "metal"), "recorded_on"),
    Table("sensors", "place", "voltage", "kind", ("heat", "light", "motion"), "checked_on"),
    Table("horses", "jockey", "weight", "breed", ("arab", "shire", "pony"), "born_on"),
    Table("tickets", "owner", "minutes", "priority", ("high", "low", "normal"), "opened_on"),
    Table("ships", "harbour", "tonnage", "flag", ("Malta", "Panama", "Norway"), "launched_on"),
)
SHAPES = (
    ("How many {name} are there?", "SELECT COUNT(*) FROM {name};"),
    ("How many {name} have {category} {value}?", "SELECT COUNT(*) FROM {name} WHERE {category} = '{value}';"),
    ("What is the average {number}?", "SELECT AVG({number}) FROM {name};"),
    ("What is the average {number} for each {category}?",
     "SELECT {category}, AVG({number}) FROM {name} GROUP BY {category};"),
    ("Count the {name} per {category}.", "SELECT {category}, COUNT(*) FROM {name} GROUP BY {category};"),
    ("Show the {n} {name} with the largest {number}.", "SELECT * FROM {name} ORDER BY {number} DESC LIMIT {n};"),
    ("Show the {n} {name} with the smallest {number}.", "SELECT * FROM {name} ORDER BY {number} LIMIT {n};"),
    ("Which {name} have a {number} above {limit}?", "SELECT * FROM {name} WHERE {number} > {limit};"),
    ("List the {label} of {name} with a {number} below {limit}.",
     "SELECT {label} FROM {name} WHERE {number} < {limit};"),
    ("Which values of {category} exist?", "SELECT DISTINCT {category} FROM {name};"),
    ("What is the total {number} where {category} is {value}?",
     "SELECT SUM({number}) FROM {name} WHERE {category} = '{value}';"),
    ("Which {label} has the latest {date}?", "SELECT {label} FROM {name} ORDER BY {date} DESC LIMIT 1;"),
    ("List the {label} where {date} is after {year}-01-01.",
     "SELECT {label} FROM {name} WHERE {date} > '{year}-01-01';"),
    ("Show {label} and {number}, sorted by {date}.", "SELECT {label}, {number} FROM {name} ORDER BY {date};"),
    ("Which {category} groups have more than {n} {name}?",
     "SELECT {category} FROM {name} GROUP BY {category} HAVING COUNT(*) > {n};"),
    ("What is the highest {number} for {category} {value}?",
     "SELECT MAX({number}) FROM {name} WHERE {category} = '{value}';"),
)  # fmt: skip

GOLDEN = tuple(
    Golden(f"Table: {schema}\nQuestion: {question}", {"regex": pattern})
    for schema, question, pattern in (
        ("boats(id, skipper, length, harbour, built_on)", "How many boats are there?",
         r"^SELECT COUNT\(\*\) FROM boats;$"),
        ("wines(id, estate, price, region, bottled_on)", "Show the 5 wines with the largest price.",
         r"^SELECT .* FROM wines ORDER BY price DESC LIMIT 5;$"),
        ("boats(id, skipper, length, harbour, built_on)", "What is the average length for each harbour?",
         r"^SELECT .*AVG\(length\).* FROM boats GROUP BY harbour;$"),
        ("wines(id, estate, price, region, bottled_on)", "Which values of region exist?",
         r"^SELECT DISTINCT region FROM wines;$"),
        ("dogs(id, owner, weight, breed, born_on)", "List the owner of dogs with a weight below 12.",
         r"^SELECT owner FROM dogs WHERE weight < 12;$"),
        ("dogs(id, owner, weight, breed, born_on)", "What is the total weight where breed is poodle?",
         r"^SELECT SUM\(weight\) FROM dogs WHERE breed = 'poodle';$"),
    )
)  # fmt: skip


def ask(rng: random.Random, table: Table, shape: tuple[str, str]) -> Example:
    """One question about a table."""
    slots = {
        "name": table.name, "label": table.label, "number": table.number, "category": table.category,
        "date": table.date, "value": rng.choice(table.values), "n": str(rng.choice((2, 3, 5, 10, 20))),
        "limit": str(rng.choice((8, 15, 40, 75, 120, 500))), "year": str(rng.randint(2012, 2024)),
    }  # fmt: skip
    question, statement = shape
    return fill(Kind(table.name, f"Table: {table.schema}\nQuestion: {question}", statement), slots)


def generate(rng: random.Random) -> list[Example]:
    """Every shape of question about every table."""
    return [ask(rng, table, shape) for table in TABLES for shape in SHAPES]
