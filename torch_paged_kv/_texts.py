"""Texts that measurements read: prompts to continue, a text whose perplexity is taken, another one to calibrate on."""

from __future__ import annotations

PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "One, two, three, four,",
    "Once upon a time there was a miller who had three sons, and",
    "The recipe is simple. First, melt the butter in a heavy pan. Then",
    "def fibonacci(n):",
    "Dear neighbours, the lift in our house will be out of order next week because",
    "The three most common causes of a flat bicycle tyre are",
    "In the year 1492",
    "Photosynthesis is the process by which plants",
    "Question: Why do ships float?\nAnswer:",
    "A short history of the bridge: it was first built of wood, and after the great flood",
    "She opened the old box carefully. Inside lay",
    "The difference between weather and climate is that",
    "To change a light bulb safely, you should",
    "Monday: soup and bread. Tuesday: rice and beans. Wednesday:",
    "The train leaves the station at nine, so we have to",
    "Bees are important because",
    "If a triangle has two equal sides, then",
    "The old man looked at the sea for a long time and said:",
)

MEASURED = """\
The harbour of Lindvik lies at the end of a narrow fjord, and for most of its history nobody outside the valley knew
its name. Until the road was built there were two ways to reach it. One could walk across the plateau, which took two
days in summer and was not to be thought of in winter, or one could come by boat, as the priest, the doctor and the
mail did, when the wind allowed it. The people lived from fish and from a few fields that the oldest families had
cleared of stones. When the herring came close to the shore, everyone worked; when it stayed away, the young men went
to sea on foreign ships and sent home what they could spare.

The first steamer arrived on a grey morning in May. It carried an engineer with a box of instruments, who stayed for
three weeks in the schoolhouse, climbed every hill above the water and wrote numbers into a small black book. The
children followed him at a distance. In the evenings he sat with the teacher, drank strong coffee and explained that a
river which falls four hundred metres within two kilometres is worth more than all the fish in the fjord. The teacher
nodded politely and did not believe a word of it. Eight years later there was a power station at the foot of the
waterfall, and the village had electric light before the capital of the province did.

What happened next is told differently by different families. Some say that the factory brought bread into every house
and that those who complained had forgotten what hunger was. Others say that the smoke killed the birch trees on the
eastern slope and that the fish never came back in the old numbers. Both are probably right. The factory made
fertiliser, and it needed heat, salt water and patient people, all of which Lindvik had. It paid on Fridays, in cash,
and on Friday nights the two shops stayed open until ten. A brass band was founded, then a football club, then a
second football club, because the first one had quarrelled about the colour of the shirts.

A power station is a simple thing to describe. Water is led from a lake on the plateau through a tunnel and then
through a steep pipe, so that it reaches the bottom with great speed. There it strikes the blades of a wheel, which
turns a shaft, which turns a magnet inside a coil of copper wire. The moving magnet pushes an electric current through
the wire, and the current is carried away over the mountains on steel towers. Nothing is burned, and the water that
leaves the house is as clean as the water that entered it. The difficulty lies in the details: the pipe must not leak,
the wheel must not shake, and the lake must be neither empty in February nor full in June, when the snow melts.

For forty years the man who watched over these details was Anders Moe. He had come as a boy to carry tools, and he knew
every valve by the sound it made. He kept a diary, too, and because he wrote down only what he had seen himself, it has
become the best source for the history of the place. On the third of February he notes the thickness of the ice, the
level of the lake and the birth of a daughter, in that order and in one sentence. About the winter in which the pipe
burst he wrote no more than half a page. Eleven men worked for thirty hours in the dark to close the gate above the
tunnel, and when it was done, somebody had put a kettle on the stove in the turbine hall, and they sat on the floor and
drank tea without saying anything.

Today the station runs by itself. A computer in a town a hundred kilometres away opens and closes the gates, and once a
week a technician drives up to look at the bearings. The turbine hall is a museum on Sundays. Visitors are shown the
black book of the engineer, the diary, and a photograph of the eleven men, in which none of them is smiling. Then the
guide asks everybody to be quiet for a minute, and one can hear the water in the pipe, a low and steady note that does
not change.
"""

CALIBRATION = (
    """\
Before you plant a fruit tree, look at the ground in which it will stand. Dig a hole two spades deep and fill it with
water. If the water is gone within an hour, the soil drains well; if it is still there the next morning, choose another
place or build a low mound. Most trees forgive poor soil sooner than wet feet. The hole should be twice as wide as the
roots but no deeper, since loose earth below a tree settles, and the tree sinks with it. Drive in the stake first and
plant afterwards, or you will damage the roots. Water the tree well, even when it rains, and keep the grass away from
its trunk for the first three years. In the second winter take out the branches that cross each other and shorten the
others by a third, always just above a bud that points outwards. Do not be afraid to cut: a tree that has been cut back
answers with strong new growth, and a tree that was spared grows into a thicket that bears small fruit.
""",
    """\
Subject: Minutes of the meeting on 12 March. Present: eight members, two guests. 1. The treasurer reported that income
was 14,250 and spending 13,870, so that 380 remain. The accounts were approved with one abstention. 2. The roof of the
club house leaks again. Three offers were compared; the cheapest (2,900) does not include the gutters. It was agreed to
ask all three companies for a new price by 1 April. 3. Summer party: the date is 21 June, from 3 p.m. Maria looks after
the music, Peter after tables and benches. If it rains, the party takes place in the school. 4. Any other business: the
key of the boat shed is missing. Whoever has it is asked to put it into the letter box, no questions asked.
""",
    """\
import math

def mean(values):
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)

def deviation(values):
    centre = mean(values)
    return math.sqrt(sum((x - centre) ** 2 for x in values) / len(values))

# Example: heights in centimetres.
heights = [172, 181, 165, 190, 177]
print(f"mean {mean(heights):.1f}, deviation {deviation(heights):.2f}")
""",
)
