"""English text to train the tiny model's tokenizer on: sentences written for it, and templates filled from word lists.

The text only has to make everyday words into few tokens; nobody learns facts from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

SENTENCES = """
The kettle began to sing before anyone in the house was awake.
A small boat left the harbour at dawn and came back with an empty net.
My grandmother kept every letter in a biscuit tin under the stairs.
If you heat the water slowly, the sugar will dissolve without stirring.
The engineer measured the voltage twice, wrote both numbers down, and frowned.
Nobody could explain why the clock in the town square ran five minutes fast.
She asked a simple question: how much energy does one answer cost?
The train was late again, so we walked along the river instead.
There are three apples on the table, and two of them are green.
Please write a short story about a fox who learns to read maps.
The battery lasted longer when the screen was dark and the radio was off.
He sold half of his stamps in April and twice as many in May.
In winter the lake freezes, and children skate on it until the light is gone.
What is the difference between weather and climate?
Every program has at least one mistake that only appears on Friday evening.
The museum opens at nine, closes at five, and is free on the first Sunday of the month.
Which of the following statements is true?
A farmer has twelve sheep; all but seven run away; how many are left?
The answer is not in the book, but the book tells you where to look.
They built the bridge from stone because wood would not survive the floods.
Summarise the passage above in one sentence.
Sound travels faster through water than through air.
After the storm, the garden was covered with leaves and broken branches.
Her brother plays the violin badly but with great enthusiasm.
The recipe calls for two cups of flour, one egg, and a pinch of salt.
When the power failed, the whole street went outside to look at the stars.
A good measurement says what it left out.
The committee decided to postpone the decision until somebody had read the report.
Could you tell me the way to the nearest station?
Light from the nearest star takes more than four years to reach us.
He explained the rules of the game, and then he broke all of them.
The price of bread rose by ten percent, while wages stayed the same.
It is easier to ask for forgiveness than to find the right form.
The old library smelled of dust, leather, and rain.
Machines that are idle still use power, although they do nothing for us.
Because the sample was small, the interval was wide.
You are a careful assistant. Think step by step and give the final answer at the end.
The doctor recommended rest, fresh fruit, and less coffee.
At the end of the road stands a house with a red door and no windows.
The capital of the country lies on the coast, near the mouth of a wide river.
Several experts disagreed, but the router chose only two of them.
The student finished the exam early and spent the rest of the hour drawing birds.
We repeated the experiment ten times and reported the median.
The first computer in our school filled a whole room and could add numbers slowly.
Mountains look blue from far away because of the air between.
Once upon a time there was a king who could not sleep without music.
Most people remember the beginning and the end, but not the middle.
Bring an umbrella, a notebook, and something to eat.
The function returns the sum of the list, or zero when the list is empty.
Mix the paint until no streaks remain, then let it rest for an hour.
Her argument was clear, short, and wrong.
Plants turn sunlight, water, and air into sugar.
The witness said that the car was white, but the photograph showed a grey one.
Before the invention of the telephone, news travelled as fast as a horse.
"""

PEOPLE = """
Anna Boris Carla David Elena Farid Grace Hugo Irene Jonas Katya Liam Maria Nadia Oscar Paula Quentin Rosa Samuel
Teresa Victor Wendy Yusuf Zoe
"""

THINGS = """
apple basket bicycle blanket bottle bread bridge bucket button cabinet camera candle carpet castle chair cheese church
circle coffee compass computer cookie cottage curtain diamond dinner doctor dragon engine factory feather fence finger
flower forest garden guitar hammer harbour helmet hospital island jacket journal kitchen ladder lantern lemon letter
library lighthouse machine magazine market medicine memory mirror mountain museum needle newspaper ocean office orange
orchard painting paper parcel pencil pepper picture pillow planet pocket potato present puzzle rabbit railway recipe
ribbon river rocket saddle sandwich school scissors shadow shelter shoulder silver spider station statue street sugar
summer telescope temple theatre ticket tomato tower tractor treasure triangle tunnel umbrella vegetable village violin
wagon wallet weather whistle window winter wizard
"""

QUALITIES = """
ancient beautiful bitter brave bright broken busy careful cheap clean clever cold comfortable common curious dangerous
dark deep delicate difficult distant dusty early elegant empty enormous expensive famous foolish friendly generous
gentle golden grateful happy heavy honest hungry important invisible jealous lonely lucky modern mysterious narrow
nervous ordinary patient peaceful perfect polite popular powerful private quick quiet rare reasonable round secret
serious silent simple slow smooth special strange strong sudden terrible thick tiny tired useful valuable warm wild
wonderful wooden yellow young
"""

ACTIONS = """
accepted admired arranged believed borrowed carried changed chased cleaned collected compared counted covered
delivered described destroyed discovered divided examined exchanged explained finished followed forgot found gathered
handled ignored imagined improved invented kept lifted located measured mentioned missed moved noticed observed
offered opened packed painted planned prepared produced protected purchased received recognised refused remembered
removed repaired replaced returned saved selected shared studied suggested touched traded understood visited wanted
washed watched weighed
"""

NOTIONS = """
ability absence advice agreement amount answer argument article attempt attention audience average balance behaviour
benefit budget calculation capacity century chapter character choice citizen climate comparison concept condition
conclusion connection consequence context contract culture currency daughter debate decision definition degree demand
description development direction discount discussion distance economy education effect effort election electricity
emotion energy environment equation evidence example exercise experience experiment explanation expression failure
fraction freedom friction function future generation gravity growth habit history hypothesis identity increase
industry influence instruction interest investment justice knowledge language lecture length literature majority
material mathematics meaning measurement method minority mixture molecule moment movement negotiation neighbour number
observation opinion opportunity organisation origin oxygen paragraph particle pattern payment percentage performance
permission perspective philosophy physics population position pressure principle probability problem process product
profession profit programme proportion protein question quotient reaction reason reference relationship religion
remainder research resource response result revolution science sentence sequence society solution species speed
strategy structure subject surface temperature theory thought tradition translation treatment velocity vocabulary
volume warning wavelength
"""

PLACES = """
after breakfast
across the valley
along the coast
around the corner
at midnight
before the meeting
behind the curtain
below the surface
between two hills
beyond the horizon
by accident
during the holiday
for the first time
from the beginning
in the afternoon
in the middle of the city
inside the laboratory
near the university
on the other side
on Thursday morning
outside the government building
over the weekend
through the forest
under the bridge
until yesterday
with great difficulty
without any warning
within a century
"""


def training_text() -> Iterator[str]:
    """Lines in a fixed order; the same on every machine."""
    yield from SENTENCES.strip().splitlines()
    people, actions, places = PEOPLE.split(), ACTIONS.split(), PLACES.strip().splitlines()
    things, notions, qualities = THINGS.split(), NOTIONS.split(), QUALITIES.split()
    for index, (person, action) in enumerate(product(people, actions)):
        # Unlike strides walk the lists out of step, so that words meet in ever new company.
        quality, place = qualities[index * 7 % len(qualities)], places[index * 5 % len(places)]
        thing, other = things[index * 11 % len(things)], things[(index * 29 + 5) % len(things)]
        notion, number = notions[index * 3 % len(notions)], index % 90 + 3
        match index % 5:
            case 0:
                yield f"{person} {action} the {quality} {thing} {place}."
            case 1:
                yield f"Question: {person} {action} {number} {thing}s and one {other} {place}. How many things is that?"
            case 2:
                yield f"The {thing} was more {quality} than the {other}, so {person} {action} it {place}."
            case 3:
                yield f"The {notion} of the {thing} was {quality}; {person} {action} it {place}."
            case _:
                yield f"Answer: there were {number} {quality} {thing}s, because {person} {action} every {notion}."
