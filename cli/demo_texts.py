"""The longer texts of the demo's prompts: paragraphs to read and sums to work out."""

from __future__ import annotations

PARAGRAPHS = (
    "The old lighthouse at Gull Point was built from grey stone. For ninety years a keeper climbed its stairs "
    "every evening to light the lamp. Today the lamp is electric and turns itself on. The keeper's house is a "
    "small museum where visitors can see the first lamp and read the keepers' diaries.",
    "Our town opened a tool library in spring. Anyone who lives here can borrow a drill, a ladder or a sewing "
    "machine for a week. Borrowing is free, but tools that come back late cost one coin a day. In the first "
    "month, two hundred people joined, and the most borrowed tool was a hedge trimmer.",
    "Honeybees tell each other where flowers are by dancing. A bee that has found food runs in a straight line "
    "and waggles. The direction of the line shows where to fly, and a longer waggle means a longer way. Other "
    "bees follow the dancer closely in the dark hive and then fly out on their own.",
    "Maya wanted to run ten kilometres. She began with short runs three times a week and added five minutes every "
    "Sunday. In the fourth week her knee hurt, so she rested for five days and bought better shoes. After three "
    "months she finished her first race in just over an hour.",
    "A glacier is a river of ice that moves slowly downhill. Snow falls on its upper end, is pressed into ice and "
    "slides over the ground, carrying stones along. At the lower end the ice melts. If more ice melts than falls "
    "as snow, the glacier becomes shorter year after year.",
    "The bakery on Mill Street changed its opening hours. From Monday to Friday it now opens at six in the "
    "morning and closes at two. On Saturday it stays open until noon, and on Sunday it is closed. The owner says "
    "that most people buy bread before work and that the bakers need their afternoons.",
    "Paper was once made from rags. Workers tore old cloth into pieces, soaked it and beat it into a pulp. They "
    "spread the pulp on a sieve, pressed the water out and hung the sheets up to dry. When more people learned to "
    "read, rags became scarce, and mills began to use wood instead.",
    "The night train leaves the capital at nine and reaches the coast at seven in the morning. It has two "
    "sleeping cars and one car with seats. Breakfast is served an hour before arrival. Tickets for the sleeping "
    "cars should be booked a week ahead, as they are often sold out in summer.",
    "Street trees make a city cooler. Their leaves give shade, and the water they breathe out takes heat from the "
    "air. On a hot day a street with trees can be several degrees cooler than one without. Young trees need "
    "watering for about three years before their roots are deep enough.",
    "Tomas found a wallet on the bus with some money and a library card in it. He could have kept it, but he "
    "asked the library for help. The librarian called the owner, an old man who had been looking for it all day. "
    "To thank him, the man taught Tomas to play chess.",
    "A sundial shows the time by the shadow of a rod. As the sun moves across the sky, the shadow moves across "
    "the marks on the plate. It cannot work at night or under clouds, and it must be set up for the place where "
    "it stands. Even so, people used sundials for thousands of years.",
    "The school garden has eight beds. Four are for vegetables, two for herbs and two for flowers. Each class "
    "looks after one bed. In June the pupils sell what they have grown at a small market, and the money pays for "
    "new seeds and for a visit to a farm.",
)

SUMS = tuple(
    form.format(7 + 5 * i % 23, 3 + i % 6, 2 + 3 * i % 5)
    for i, form in enumerate(
        (
            "A shop has {0} boxes with {1} apples in each. It sells {2} boxes. How many apples are left?",
            "Anna reads {0} pages a day for {1} days and then {2} more pages. How many pages has she read?",
            "A bus carries {0} people. At every one of {1} stops {2} people get on. How many people are on it now?",
            "One ticket costs {1} dollars. How much do {0} tickets cost with a discount of {2} dollars on the whole?",
            "A library has {0} shelves with {1} books on each. {2} books are lent out. How many are left?",
            "Ben saves {1} dollars a week and already has {0} dollars. How much will he have after {2} weeks?",
            "A garden is {0} metres long and {1} metres wide. How long is a fence around it?",
            "One cake needs {1} eggs. A baker makes {0} cakes and has {2} eggs left. How many eggs were there?",
            "A car drives {0} kilometres an hour for {1} hours and {2} kilometres more. How far does it go?",
            "There are {0} red and {1} blue marbles in each of {2} bags. How many marbles are there in all?",
            "What is {0} plus {1} times {2}? Explain the order of the steps.",
            "A class of {0} pupils gets {1} new pupils, and {2} move away. How many pupils are in the class?",
        )
        * 2
    )
)
