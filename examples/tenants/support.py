"""Customers' tickets and their triage as one line of JSON with fixed keys."""

import json
import random

from examples.tenants.templates import Example, Golden, capital

KEYS = ("category", "priority", "product", "mood", "route")
PRODUCTS = (
    "router", "headset", "mobile app", "smart lamp", "coffee machine", "web shop", "thermostat", "printer",
    "e-bike", "watch", "speaker", "dash cam",
)  # fmt: skip
ISSUES = (
    ("hardware", "high", "The {product} does not switch on any more."),
    ("hardware", "normal", "A button on my {product} got stuck."),
    ("hardware", "high", "My {product} gets so hot that I cannot touch it."),
    ("hardware", "low", "There is a small scratch on the new {product}."),
    ("hardware", "normal", "The {product} makes a strange clicking noise."),
    ("software", "normal", "Since the last update the {product} shows an empty screen."),
    ("software", "high", "The {product} crashes every time I open the settings."),
    ("software", "low", "The clock on the {product} is one hour behind."),
    ("software", "normal", "The {product} forgets my preferences after every restart."),
    ("software", "low", "The {product} speaks the wrong language to me."),
    ("billing", "high", "I was charged twice for the {product}."),
    ("billing", "normal", "The invoice for my {product} has the wrong address."),
    ("billing", "normal", "My discount code was not applied to the {product}."),
    ("billing", "high", "You still take money for a {product} that I gave back."),
    ("billing", "low", "Can I get a receipt for the {product} in euros?"),
    ("shipping", "normal", "My {product} should have arrived last week."),
    ("shipping", "high", "The parcel was empty, there was no {product} in it."),
    ("shipping", "low", "Can I change the delivery day of my {product}?"),
    ("shipping", "normal", "You sent the {product} in the wrong colour."),
    ("shipping", "normal", "The courier left my {product} with a stranger."),
    ("account", "high", "Somebody else logged in and ordered a {product} in my name."),
    ("account", "normal", "I cannot reset the password that belongs to my {product}."),
    ("account", "low", "How do I change the e-mail address for my {product}?"),
    ("account", "normal", "My {product} says that my account does not exist."),
    ("account", "low", "I want to register a second {product} on my account."),
)
OPENINGS = {
    "calm": ("Hello, ", "Hi team, ", "Good morning. ", "Dear support, ", ""),
    "angry": ("This is ridiculous! ", "I am really fed up. ", "Third time I write to you! ", "What a mess! "),
    "worried": ("Please help, I am worried. ", "I am a bit nervous about this. ", "Oh no. "),
}
URGENT = ("I need this solved today.", "We have guests tonight, so hurry.", "Every hour costs me money.")
CLOSINGS = ("Thanks.", "Kind regards, Mia", "What can I do?", "Please let me know.", "Best, Tom", "")
ROUTES = {"hardware": "repair", "software": "engineering", "billing": "finance", "shipping": "logistics",
          "account": "security"}  # fmt: skip


def triage(category: str, priority: str, product: str, mood: str) -> str:
    """The answer to a ticket, keys in the order of KEYS."""
    values = (category, priority, product, mood, ROUTES[category])
    return json.dumps(dict(zip(KEYS, values, strict=True)))


def ticket(rng: random.Random, issue: tuple[str, str, str], product: str) -> Example:
    """One ticket: the mood comes from its opening, and an urgent closing lifts the priority to `urgent`."""
    category, priority, text = issue
    mood = rng.choice(tuple(OPENINGS))
    is_urgent = rng.random() < 0.25
    parts = (
        join(rng.choice(OPENINGS[mood]), text.format(product=product)),
        rng.choice(URGENT if is_urgent else CLOSINGS),
    )
    prompt = capital(" ".join(part for part in parts if part))
    return Example(text, prompt, triage(category, "urgent" if is_urgent else priority, product, mood))


def join(opening: str, sentence: str) -> str:
    """`opening` before `sentence`, which goes on in lower case after a comma unless it starts with "I"."""
    if opening.endswith(", ") and not sentence.startswith("I "):
        sentence = sentence[0].lower() + sentence[1:]
    return opening + sentence


GOLDEN = tuple(
    Golden(prompt, {"json_keys": KEYS})
    for prompt in (
        "Hello, the screen of my tablet is cracked. What can I do?",
        "This is ridiculous! I paid for the toaster twice. I need this solved today.",
        "My camera was delivered to the wrong house. Thanks.",
        "Please help, I am worried. Someone changed the password of my doorbell account.",
        "Good morning. The vacuum robot freezes when I start the app. Please let me know.",
        "Hi team, can I get the invoice for my kettle once more? Best, Tom",
    )
)


def generate(rng: random.Random) -> list[Example]:
    """Every issue with many products, moods and closings."""
    drawn = [ticket(rng, issue, product) for issue in ISSUES for product in rng.sample(PRODUCTS, 10)]
    return list({example.prompt: example for example in drawn}.values())
