"""The prompts of the demo, composed from small lists: things people ask, of many kinds.

Every kind has topics and forms; a topic is asked in a few of the forms. The split is by topic, so that a held-out
prompt is about something that no training prompt mentions in that kind.
"""

from __future__ import annotations

from dataclasses import dataclass

from .demo_texts import PARAGRAPHS, SUMS

HELD_OUT_EVERY = 6
"""One topic in so many is held out."""


@dataclass(frozen=True)
class Kind:
    """One kind of prompt: each topic is put into ``each`` of the forms, starting one form further every time."""

    category: str
    forms: tuple[str, ...]
    topics: tuple[str, ...]
    each: int

    def rows(self, topic: int) -> list[dict[str, str]]:
        """The prompts of one topic as rows of a prompts file."""
        picked = [(topic + i) % len(self.forms) for i in range(self.each)]
        return [
            {
                "id": f"{self.category}-{topic:02d}-{form}",
                "category": self.category,
                "prompt": self.forms[form].format(self.topics[topic]),
            }
            for form in picked
        ]


def training_rows() -> list[dict[str, str]]:
    """Rows with id, category and prompt; neighbours are of different kinds, so that any first part is varied."""
    return _rows(held_out=False)


def held_out_rows() -> list[dict[str, str]]:
    """Rows about topics that no training row has."""
    return _rows(held_out=True)


def _rows(held_out: bool) -> list[dict[str, str]]:
    chosen = [
        kind.rows(topic)
        for topic in range(max(len(kind.topics) for kind in KINDS))
        for kind in KINDS
        if topic < len(kind.topics) and (topic % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out
    ]
    most = max(len(rows) for rows in chosen)
    return [rows[i] for i in range(most) for rows in chosen if i < len(rows)]


def _items(text: str) -> tuple[str, ...]:
    return tuple(" ".join(item.split()) for item in text.split(";"))


KINDS = (
    Kind(
        "explain",
        (
            "Explain {} to a ten-year-old.",
            "What is {} and why does it matter?",
            "Describe in a few sentences how {} works.",
            "Give a short introduction to {} for a curious beginner.",
        ),
        _items("""photosynthesis; gravity; inflation; the water cycle; a computer virus; vaccination; the internet; an
            electric motor; supply and demand; a solar eclipse; recycling; democracy; the immune system; a
            database; machine learning; the food chain; a lever; compound interest; the stock market; an
            earthquake; a battery; sleep; refrigeration; evolution; a black hole; radio; fermentation; the
            printing press; insurance; a compass"""),
        3,
    ),
    Kind(
        "list",
        ("List five {}.", "Give me three {} and say one sentence about each.", "Make a numbered list of {}."),
        _items("""healthy breakfast ideas; ways to save water at home; things to pack for a hike; animals that live in
            the ocean; reasons to learn a language; games for a rainy day; uses of a smartphone at school; famous
            rivers; tips for a job interview; simple exercises for the back; ideas for a birthday party; fruits
            that are rich in vitamins; questions to ask a new neighbour; tools every home should have; habits of
            good students; inventions that changed travel; plants that need little light; ways to calm down before
            a test"""),
        3,
    ),
    Kind(
        "story",
        (
            "Write a short story about {}.",
            "Write a poem of four lines about {}.",
            "Begin a fairy tale about {}. Write the first paragraph only.",
            "Tell a funny story about {} in five sentences.",
        ),
        _items("""a fox who is afraid of the dark; a robot that learns to paint; two friends lost in a forest; a clock
            that runs backwards; a girl who finds a tiny dragon; a baker who cannot taste; the last tree in a
            city; a cat that wants to be a teacher; a letter that arrives fifty years late; a boy who talks to the
            sea; a lonely lighthouse keeper; a wizard who forgets his spells; a bird that is scared of flying; a
            train that goes to the moon; an honest thief; a snowman in summer; a mouse that saves a lion; a town
            without colours"""),
        3,
    ),
    Kind(
        "email",
        ("Write a short, polite email {}.", "Draft a friendly message {}. Keep it under one hundred words."),
        _items("""asking a teacher for more time for homework; thanking a colleague for help with a project; telling a
            landlord that the heating is broken; inviting a friend to dinner on Friday; asking a shop to replace a
            broken lamp; cancelling a dentist appointment; applying for a summer job in a library; congratulating
            a cousin on a new baby; asking the boss for a day off; telling a team that the meeting moved to
            Tuesday; asking a hotel about a lost jacket; welcoming a new member to a book club"""),
        2,
    ),
    Kind(
        "code",
        (
            "Write a Python function that {}.",
            "Show Python code that {} and explain how it works.",
            "How would you write a program that {}? Describe the steps, then give the code.",
        ),
        _items("""reverses a string; checks whether a number is prime; counts the words in a text; finds the largest
            number in a list; computes the factorial of a number; removes duplicates from a list; checks whether a
            word is a palindrome; converts Celsius to Fahrenheit; adds up the digits of a number; sorts a list of
            names by length; prints the first ten Fibonacci numbers; counts the vowels in a sentence; merges two
            dictionaries; reads a file line by line; finds the average of a list; draws a square of stars; counts
            how often each letter occurs; checks whether a year is a leap year"""),
        2,
    ),
    Kind("arithmetic", ("{}", "{} Show your steps."), SUMS, 1),
    Kind(
        "summary",
        (
            "Summarize the following text in one sentence.\n\n{}",
            "Give this text a title and list its two main points.\n\n{}",
            "{}\n\nWhat is this text about? Answer in your own words.",
            "{}\n\nWrite one question about this text and answer it.",
        ),
        PARAGRAPHS,
        3,
    ),
    Kind(
        "rewrite",
        (
            "Rewrite this sentence in a more formal way: {}",
            "Make this sentence shorter: {}",
            "Rewrite this sentence in the past tense: {}",
            "Say the same thing in different words: {}",
        ),
        _items("""We really need to get this thing done by Friday.; The dog runs quickly through the big green park.; I
            can't come to the party because I have to work.; She thinks that the movie is kind of boring.; They
            want to buy a house that is close to the school.; Give me a call when you get home.; The weather is
            getting colder and colder every day.; He always forgets where he puts his keys.; Lots of people like
            to drink coffee in the morning.; My sister wants to become a doctor because she likes to help people.;
            The food here is great, but it takes forever to arrive.; You should check the tires before you start a
            long trip."""),
        3,
    ),
    Kind(
        "translate",
        ("Translate into French: {}", "Translate into Spanish: {}", "How do you say in German: {}"),
        _items("""Good morning, how are you?; Where is the train station?; I would like a cup of tea.; My brother lives
            in a small town.; The book is on the table.; We are going to the beach tomorrow.; She has two cats and
            a dog.; Can you help me, please?; The soup is very hot.; I do not understand the question.; It is
            raining today.; Thank you for the beautiful flowers."""),
        2,
    ),
    Kind(
        "advice",
        (
            "How can I {}?",
            "I want to {}. What should I do first?",
            "Give me step-by-step advice on how to {}.",
        ),
        _items("""sleep better at night; learn to cook; spend less time on my phone; make new friends in a new city; get
            ready for a long flight; stop biting my nails; grow tomatoes on a balcony; speak in front of a group;
            keep my desk tidy; learn to play the guitar; eat more vegetables; plan a weekly budget; get over a
            cold; train a puppy; remember people's names; start a small garden; study for three exams at once;
            write a diary"""),
        3,
    ),
    Kind(
        "compare",
        (
            "What is the difference between {}?",
            "Compare {} in a few sentences.",
            "Name one advantage of each: {}.",
        ),
        _items("""cats and dogs; trains and buses; tea and coffee; a novel and a short story; city life and country
            life; weather and climate; renting and buying a home; a lake and a sea; paper books and e-books;
            jogging and swimming; a virus and a bacterium; wood and steel; summer and winter holidays; frogs and
            toads; solar power and wind power; a guitar and a violin; working at home and working in an office;
            butter and olive oil"""),
        2,
    ),
    Kind(
        "classify",
        (
            "Is this review positive or negative? Explain why.\n\n{}",
            "Which feelings does the writer of this text show?\n\n{}",
        ),
        _items("""The staff were kind, and the room was spotless. We will come back.; I waited an hour for a cold
            pizza.; The blender broke after two days, and nobody answers the phone.; What a lovely concert, I
            smiled all the way home!; The shoes look nice but hurt after ten minutes.; My order came early and
            everything was well packed.; The guide knew every stone of the old town.; The app crashes whenever I
            open it.; Best haircut I have had in years.; The museum was so crowded that we saw nothing.; A warm
            jacket at a fair price.; The instructions were impossible to follow."""),
        1,
    ),
)
