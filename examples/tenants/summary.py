"""Short news items and the one sentence that sums them up."""

import random

from examples.tenants.templates import Example, Golden, Kind, draw, pool

POOLS = (
    pool("town", "Ashford", "Larkhaven", "Millbrook", "Tarnow", "Port Selma", "Quillan", "Oakridge", "Venlo",
         "Duneside"),
    pool("who", "Nora Bell", "Ivan Petrov", "Amara Okoye", "Luis Ortega", "Hana Sato", "Greta Lind", "Omar Haddad"),
    pool("firm", "Brightline", "Corvex", "Halden Foods", "Nimbus Labs", "Ostara", "Petrel Motors", "Zephyr Air"),
    pool("day", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    pool("n", "12", "25", "40", "60", "150", "300", "900"),
    pool("money", "two million", "five million", "ten million", "thirty million"),
)  # fmt: skip
KINDS = tuple(
    Kind(topic, text, summary)
    for topic, text, summary in (
        ("park", "The council of {town} met on {day} evening. After two hours of debate it agreed to turn the old rail "
         "yard into a park. Work should begin in spring and cost {money} euros.",
         "{town} will turn its old rail yard into a park for {money} euros."),
        ("layoffs", "Staff at {firm} were called to a meeting on {day}. Managers told them that sales had fallen for a "
         "year. {n} people will lose their jobs by summer.", "{firm} will cut {n} jobs after a year of falling sales."),
        ("storm", "Strong winds reached {town} during the night. Trees fell on power lines, and {n} homes were left in "
         "the dark. Crews hope to finish repairs by {day}.", "A storm in {town} left {n} homes without power."),
        ("match", "It rained the whole match in {town}. The home side was behind until late. Then {who} scored twice "
         "in the last ten minutes and the crowd went wild.", "Two late goals by {who} won a rainy match for {town}."),
        ("study", "Researchers followed {n} adults for five years. Some walked every day and others did not. {who}, "
         "who led the work, says that the walkers slept far better.", "A study of {n} adults found that daily walkers "
         "sleep better."),
        ("launch", "{firm} showed its newest product on {day}. The device folds, weighs little and runs for three "
         "days. Shops will have it next month.", "{firm} unveiled a light folding device that runs for three days."),
        ("rescue", "A hiker was reported missing near {town} on {day}. {n} volunteers searched through the night. "
         "{who} was found at dawn, cold but unharmed.", "Volunteers found the missing hiker {who} unharmed near "
         "{town}."),
        ("merger", "For months there were rumours about {firm}. On {day} the company confirmed that it will buy a "
         "smaller rival. The price is {money} dollars.", "{firm} is buying a smaller rival for {money} dollars."),
        ("school", "Classrooms in {town} have been too full for years. A new school will open there in autumn. It has "
         "room for {n} pupils and a garden on the roof.", "A new school for {n} pupils will open in {town} this "
         "autumn."),
        ("recall", "Buyers complained that a charger became very hot. {firm} looked into it and found a faulty part. "
         "All {n} thousand chargers are being called back.", "{firm} is recalling {n} thousand chargers because of a "
         "faulty part."),
        ("prize", "{who} grew up in {town} and wrote at night after work. The first novel sold few copies. On {day} "
         "the second one won the national prize.", "{who} from {town} won the national prize with a second novel."),
        ("bridge", "The bridge at {town} is nearly a century old. Inspectors found deep cracks on {day}. It is now "
         "shut to all traffic until further notice.", "The old bridge at {town} is shut because of deep cracks."),
        ("strike", "Drivers at {firm} want better pay. Talks broke down on {day} without a result. From next week {n} "
         "buses will stay in the depot.", "A pay dispute at {firm} will keep {n} buses off the road next week."),
        ("museum", "A farmer near {town} hit something hard with his plough. It was a jar with {n} silver coins. The "
         "museum will show them from {day}.", "A farmer near {town} dug up a jar of {n} silver coins."),
        ("election", "Voters in {town} went to the polls on {day}. Few had given {who} a chance. In the end the "
         "newcomer won by {n} votes.", "Newcomer {who} won the vote in {town} by {n} votes."),
        ("drought", "It has not rained in {town} for weeks. The lake has shrunk to half its size. From {day} nobody "
         "may water a garden or wash a car.", "{town} has banned garden watering because of a drought."),
        ("record", "{who} started running only three years ago. On {day} the baker from {town} ran {n} kilometres "
         "without a break. That is a new record.", "{who}, a baker, set a record by running {n} kilometres."),
        ("hospital", "The hospital in {town} was short of nurses. It now pays for their flats and lessons. Since then "
         "{n} nurses have signed up.", "Free flats and lessons brought {n} new nurses to the hospital in {town}."),
        ("fire", "Smoke rose from a warehouse of {firm} on {day}. {n} firefighters fought the flames until midnight. "
         "Nobody was hurt, but the building is lost.", "A fire destroyed a warehouse of {firm}, but nobody was hurt."),
        ("festival", "The music festival in {town} used to be small. This year {n} bands will come. Tickets sold out "
         "within an hour on {day}.", "Tickets for the festival in {town} with {n} bands sold out in an hour."),
        ("donation", "{who} lived quietly in a small flat in {town}. Nobody knew that the former teacher was rich. In "
         "the will {money} dollars go to the library.", "Former teacher {who} left {money} dollars to the library of "
         "{town}."),
        ("train", "The night train to {town} was stopped ten years ago. {firm} will bring it back this winter. It "
         "leaves every {day} and has {n} beds.", "{firm} is bringing back the night train to {town}."),
        ("factory", "{firm} has looked for a site for a long time. It has now chosen {town} for its new plant. The "
         "company will hire {n} people there.", "{firm} will build a plant in {town} and hire {n} people."),
        ("animals", "Wolves had not been seen near {town} for a century. On {day} a camera filmed a pair with cubs. "
         "{who} of the forest office calls it a small wonder.", "Wolves have returned to the woods near {town} after a "
         "century."),
        ("outage", "Customers of {firm} could not log in on {day}. The cause was a broken cable. After {n} minutes the "
         "service was back.", "A broken cable cut off customers of {firm} for {n} minutes."),
        ("chef", "{who} opened a tiny restaurant in {town} with {n} seats. There is no menu, only what the market had "
         "that day. Guests now wait months for a table.", "Guests wait months for the tiny restaurant of {who} in "
         "{town}."),
        ("court", "A court in {town} heard the case on {day}. {firm} had dumped waste in the river for years. It must "
         "now pay {money} euros.", "{firm} must pay {money} euros for dumping waste in a river."),
        ("ferry", "Fog lay over the harbour of {town} on {day}. The ferry with {n} passengers hit a sandbank. All were "
         "brought ashore in small boats.", "All {n} passengers were saved when a ferry ran aground off {town}."),
    )
)  # fmt: skip

GOLDEN = tuple(
    Golden(text, {"regex": r"^[^.!?\n]{15,160}\.$"})
    for text in (
        "The old cinema in Bramley closed ten years ago. A group of neighbours bought it together. On Friday it shows "
        "its first film again.",
        "Tessa Wong noticed a leak under the road on Monday. Engineers came within an hour. Without her call 80 "
        "cellars would have flooded.",
        "Orion Bikes had planned to open in May. Then the paint supplier went out of business. The shop will now open "
        "in September.",
        "Bakers in Colby met on Tuesday. Flour costs twice as much as last year. From June a loaf will cost five "
        "euros.",
        "A balloon drifted over the airport of Silverton. Planes had to circle for 50 minutes. The pilot has lost his "
        "licence.",
        "Scientists put small tags on 70 storks. They flew further than anyone had thought. One of them crossed the "
        "Sahara twice.",
    )
)


def generate(rng: random.Random) -> list[Example]:
    """Every story with other towns, people, firms and figures."""
    return draw(rng, KINDS, POOLS, num_per_kind=9)
