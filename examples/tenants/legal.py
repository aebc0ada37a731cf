"""Contract clauses and what they mean in plain English."""

import random

from examples.tenants.templates import Example, Golden, Kind, draw, pool

PAIRS = tuple(
    {"one": one, "two": two}
    for one, two in (
        ("Supplier", "Customer"),
        ("Licensor", "Licensee"),
        ("Contractor", "Client"),
        ("Landlord", "Tenant"),
        ("Lender", "Borrower"),
        ("Publisher", "Author"),
        ("Franchisor", "Franchisee"),
        ("Agency", "Advertiser"),
        ("Carrier", "Shipper"),
        ("Provider", "Subscriber"),
    )
)
DAYS = tuple(
    {"days": days, "n": n}
    for days, n in (
        ("seven (7)", "7"),
        ("ten (10)", "10"),
        ("fourteen (14)", "14"),
        ("thirty (30)", "30"),
        ("forty-five (45)", "45"),
        ("sixty (60)", "60"),
        ("ninety (90)", "90"),
    )
)
POOLS = (
    PAIRS,
    DAYS,
    pool("place", "Delaware", "Ontario", "Ireland", "Singapore", "New York", "Scotland", "Bavaria", "Queensland"),
    pool("percent", "1.5", "2", "3", "5", "8"),
    pool("money", "$500", "$2,000", "$10,000", "$25,000", "$100,000"),
)

KINDS = tuple(
    Kind(topic, clause, f"Plain English: {plain}")
    for topic, clause, plain in (
        (
            "payment",
            "The {two} shall remit all sums due hereunder to the {one} within {days} days of receipt of a valid "
            "invoice.",
            "the {two} must pay the {one}'s invoices within {n} days.",
        ),
        (
            "late interest",
            "Any sum not paid when due shall accrue interest at the rate of {percent}% per month until paid in full by "
            "the {two}.",
            "if the {two} pays late, it owes {percent}% interest for each month until it pays.",
        ),
        (
            "termination for convenience",
            "The {one} may terminate this Agreement without cause upon {days} days' prior written notice to the {two}.",
            "the {one} can end the contract for any reason by telling the {two} in writing {n} days before.",
        ),
        (
            "termination for breach",
            "Should the {two} commit a material breach and fail to cure same within {days} days of notice thereof, the "
            "{one} may terminate forthwith.",
            "if the {two} breaks the contract and does not fix it within {n} days, the {one} can end it at once.",
        ),
        (
            "governing law",
            "This Agreement shall be governed by and construed in accordance with the laws of {place}, without regard "
            "to conflict of laws principles.",
            "the law of {place} applies to this contract.",
        ),
        (
            "liability cap",
            "In no event shall the aggregate liability of the {one} arising hereunder exceed {money}.",
            "the most the {one} can ever be made to pay is {money}.",
        ),
        (
            "confidentiality",
            "The {two} shall hold all Confidential Information in strict confidence and shall not disclose same to any "
            "third party.",
            "the {two} must keep secret what it learns and tell no one else.",
        ),
        (
            "assignment",
            "The {two} shall not assign or otherwise transfer its rights hereunder without the prior written consent "
            "of the {one}.",
            "the {two} cannot hand this contract to someone else unless the {one} agrees in writing.",
        ),
        (
            "force majeure",
            "Neither party shall be liable for any failure to perform occasioned by causes beyond its reasonable "
            "control.",
            "nobody is to blame if something outside their control stops them from doing their part.",
        ),
        (
            "entire agreement",
            "This instrument, made between the {one} and the {two}, constitutes the entire agreement and supersedes "
            "all prior understandings.",
            "only what is written here counts; earlier promises between the {one} and the {two} no longer do.",
        ),
        (
            "severability",
            "If any provision hereof is held unenforceable by a court of {place}, the remaining provisions shall "
            "continue in full force.",
            "if a court in {place} strikes out one part, the rest of the contract still stands.",
        ),
        (
            "indemnity",
            "The {two} shall indemnify and hold harmless the {one} from any claims arising out of the {two}'s "
            "negligence.",
            "if the {two} is careless and someone makes a claim, the {two} pays and not the {one}.",
        ),
        (
            "renewal",
            "This Agreement shall renew automatically for successive one-year terms unless either party gives notice "
            "{days} days prior to expiry.",
            "the contract goes on for another year each time unless someone says no {n} days before it ends.",
        ),
        (
            "audit",
            "Upon {days} days' notice, the {one} shall be entitled to inspect the books and records of the {two}.",
            "the {one} may look through the {two}'s records after giving {n} days' warning.",
        ),
        (
            "deposit",
            "The {two} shall lodge with the {one} a deposit of {money}, refundable upon expiry less any sums owing.",
            "the {two} gives the {one} {money} up front and gets it back at the end, minus what it still owes.",
        ),
        (
            "insurance",
            "The {two} shall procure and maintain public liability insurance of not less than {money} throughout the "
            "Term.",
            "the {two} must have insurance for at least {money} the whole time.",
        ),
        (
            "delivery",
            "Title and risk in the goods shall pass from the {one} to the {two} upon delivery.",
            "once the goods arrive, they belong to the {two}, who bears any loss.",
        ),
        (
            "acceptance",
            "The deliverables shall be deemed accepted unless the {two} gives notice of rejection within {days} days.",
            "if the {two} says nothing for {n} days, the work counts as accepted.",
        ),
        (
            "waiver",
            "No failure or delay by the {one} in exercising any right shall operate as a waiver thereof.",
            "the {one} keeps its rights even if it does not use them straight away.",
        ),
        (
            "price change",
            "The {one} reserves the right to increase its charges by no more than {percent}% upon {days} days' notice.",
            "the {one} can raise prices by up to {percent}% if it says so {n} days before.",
        ),
        (
            "arbitration",
            "All disputes arising hereunder shall be finally settled by binding arbitration seated in {place}.",
            "arguments are settled by a private judge in {place} and not in court, and that decision is final.",
        ),
        (
            "non-compete",
            "For {days} days following termination the {two} shall not engage in any business competing with the {one} "
            "in {place}.",
            "after the contract ends, the {two} may not compete with the {one} in {place} for {n} days.",
        ),
        (
            "notices",
            "All notices shall be in writing and deemed received by the {two} {days} days after posting to its last "
            "known address.",
            "letters count as received by the {two} {n} days after they are posted.",
        ),
        (
            "taxes",
            "All fees are exclusive of taxes, duties and levies, which shall be borne solely by the {two}.",
            "tax comes on top of the price, and the {two} pays it.",
        ),
        (
            "intellectual property",
            "All right, title and interest in the works shall vest exclusively in the {one} upon creation.",
            "whatever is made belongs to the {one} from the moment it is made.",
        ),
        (
            "subcontracting",
            "The {one} may engage subcontractors provided that it shall remain fully liable to the {two} for their "
            "acts.",
            "the {one} may use other firms, but answers to the {two} for what they do.",
        ),
        (
            "repairs",
            "The {two} shall at its own expense make good any damage occasioned to the premises within {days} days.",
            "the {two} must repair any damage within {n} days and pay for it.",
        ),
        (
            "cancellation fee",
            "In the event of cancellation by the {two}, a cancellation fee of {money} shall become immediately "
            "payable.",
            "if the {two} cancels, it must pay {money} right away.",
        ),
        (
            "warranty disclaimer",
            "The services are furnished by the {one} as is, and all implied warranties are hereby expressly "
            "disclaimed.",
            "the {one} makes no promise that the service is good or fit for anything.",
        ),
        (
            "survival",
            "The obligations of the {two} under this Clause shall survive termination for a period of {days} days.",
            "the {two} must keep to this part for {n} days after the contract ends.",
        ),
    )
)

GOLDEN = tuple(
    Golden(clause, {"regex": r"^Plain English: .+"})
    for clause in (
        "The Buyer shall effect payment to the Seller within twenty (20) days of the invoice date.",
        "The Dealer may terminate this Agreement upon five (5) days' prior written notice to the Distributor.",
        "This Agreement shall be governed by the laws of Norway.",
        "The Consultant shall not disclose any Confidential Information of the Company to any third party.",
        "In no event shall the liability of the Operator exceed $7,500.",
        "The Lessee shall maintain insurance of not less than $50,000 throughout the Term.",
    )
)


def generate(rng: random.Random) -> list[Example]:
    """Every clause kind with several parties, periods, sums and places."""
    return draw(rng, KINDS, POOLS, num_per_kind=9)
