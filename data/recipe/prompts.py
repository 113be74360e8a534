"""Training prompts for the draft head, made from templates and fillers.

Enters: a seed, nothing else. The tables below are the only source of text.
Leaves: ``training_prompts(seed)``, a shuffled list of distinct
``{"category": str, "prompt": str}`` with single-turn English prompts in eight
categories. The same seed always gives the same list in the same order.
Does not know: the verifier, its chat template or tokenizer, the answers, and the
evaluation prompts (``tests/test_prompt_data.py`` checks that the two do not meet).
"""
import random
from collections.abc import Callable

# How many prompts each category contributes.
QUOTA = {"writing": 1680, "roleplay": 1680, "reasoning": 1680, "math": 1680,
         "coding": 3000, "extraction": 1680, "stem": 1680, "humanities": 1680}


def _table(text: str) -> list[str]:
    """Split a block of text at '|' and fold the white space in each entry."""
    return [" ".join(entry.split()) for entry in text.split("|") if entry.strip()]


NAMES = _table("""Anna|Ben|Carla|David|Elena|Farid|Grace|Hugo|Isla|James|Keiko|Liam|Maria|Noah|Olga
|Paul|Quinn|Rosa|Samir|Tara|Umar|Vera|Walter|Xenia|Yusuf|Zoe|Amara|Bruno|Chloe|Diego""")
CITIES = _table("""Lisbon|Denver|Nairobi|Osaka|Leeds|Toronto|Warsaw|Lima|Cairo|Bergen|Chennai|Austin
|Dublin|Seville|Hanoi|Geneva""")
JOBS = _table("""nurse|carpenter|teacher|bus driver|software engineer|baker|photographer|electrician
|librarian|farmer|accountant|chef|mechanic|journalist|dentist|gardener""")
DAYS = _table("Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday")
MONTHS = _table("January|February|March|April|May|June|July|August|September|October|November|December")

# writing
WRITING_TOPICS = _table("""a summer road trip|learning to cook|moving to a new city|a rainy afternoon|the first day
of school|a lost dog|growing vegetables on a balcony|an old bicycle|a family reunion|a winter market|working from
home|a broken promise|a quiet library|a trip to the mountains|a new coffee shop|saving money|running a first
marathon|a birthday surprise|a night train|a garden in spring|a smartphone addiction|a friendly robot|a storm at
sea|volunteering at a shelter|a handmade gift|an empty theatre|public parks|a small bookshop|reading every day|riding
the bus to work|a power cut|learning the piano|a neighbour who sings|city noise|a football match|a long-distance
friendship|healthy breakfasts|a forgotten photograph|home exercise|the last day of a holiday""")
WRITING_FORMS = _table("""Write a short story about {t}.|Write a poem about {t}.|Write a haiku about {t} and then
explain it.|Write a blog post about {t}.|Write the opening paragraph of a novel about {t}.|Write a friendly email to a
friend about {t}.|Write a diary entry about {t}.|Compose a short speech about {t}.|Write a dialogue between two people
talking about {t}.|Draft a newspaper article about {t}.|Write a descriptive paragraph about {t}.|Write a song with two
verses and a chorus about {t}.|Give me five possible titles for an essay about {t}.|Write an outline for an essay on
{t}.|Write a persuasive paragraph about {t}.|Write a children's story about {t}.|Write a product advertisement
inspired by {t}.|Write a letter to the editor about {t}.|Create a list of ten writing ideas about {t}.|Write three
social media captions about {t}.|Write a limerick about {t}.|Write a short film scene about {t}.|Write a fable about
{t} that ends with a moral.|Write a review in which the author talks about {t}.""")
WRITING_STYLES = _table("""Keep it under 150 words.|Use a humorous tone.|Use simple words.|Make it sad but
hopeful.|Use the first person.|Use vivid details.|Aim it at teenagers.|Make it formal and polite.|End with a
question.|Use short sentences.""") + [""]
EMAILS = _table("""ask my manager for a day off on {d}|invite the team to lunch on {d}|apologise for missing the
meeting on {d}|remind a customer that a payment is due on {d}|thank {n} for help with the move|tell the landlord that
the heating is broken since {d}|ask {n} for a letter of recommendation|cancel a booking for {d}|congratulate {n} on a
promotion|complain about a parcel that should have arrived on {d}|offer {n} a ride to the airport on {d}|introduce
{n} as a new colleague""")
EMAIL_FORMS = _table("""Write an email to {e}.|Draft a short, polite message to {e}.|Help me write a note to {e}.
|Write a formal letter to {e}.|I need to {e}. Please write the email for me.""")

# roleplay
PERSONAS = _table("""a pirate captain|a medieval blacksmith|a tour guide in Rome|a strict piano teacher|a cheerful
weather presenter|a detective in the 1920s|an astronaut on Mars|a talking cat|a wise old tree|a French chef|a football
coach|a museum guard at night|a time traveller from 2300|a ghost in an old hotel|a kindergarten teacher|a dragon who
collects books|a Roman senator|a hotel receptionist|a job interviewer|a travel agent|a fitness trainer|a lighthouse
keeper|a Viking trader|a friendly vampire|a fairy-tale witch|a science fiction robot butler|a bus driver who loves
poetry|a retired spy|a stand-up comedian|a mountain guide|a submarine captain|a shy librarian|a goblin merchant|a
news reporter|a queen of a small island|a gardener at a palace|a vintage car dealer|a beekeeper|a sleepy bear|an alien
visiting Earth""")
ROLE_ASKS = _table("""Tell me about your typical day.|Introduce yourself to a stranger.|Give me advice about making
friends.|Describe the place where you live.|Tell me about your biggest mistake.|Explain what you love about your
life.|What do you think about modern phones?|Convince me to visit you.|Tell me a story from your youth.|How do you
deal with fear?|What would you do with one million coins?|Describe your favourite meal.|Give a short speech to your
followers.|What is your greatest secret?|Answer my question: what makes a good leader?|Teach me one skill you know
well.|React to the news that it will snow tomorrow.|Complain about your neighbours.|Describe the strangest person you
ever met.|Tell me your plans for the weekend.|Welcome me as your new apprentice.|Explain how you earn your
living.|Write a postcard home.|Give me three rules to live by.|Tell me why I should trust you.|Describe what you see
from your window.|Help me choose a birthday present for my sister.|Warn me about a danger nearby.""")
ROLE_FRAMES = _table("""You are {p}. {a}|Pretend to be {p}. {a}|Imagine you are {p}. {a}|Act as {p} and stay in
character. {a}|Let us play a game: you are {p} and I am a visitor. {a}|Speak to me as {p} would. {a}""")

# reasoning
ORDERINGS = _table("older|taller|faster|richer|heavier|stronger|louder|happier")
GROUPS = {"fruits": "apple|banana|cherry|mango|pear|grape", "tools": "hammer|saw|drill|wrench|pliers|chisel",
          "animals": "horse|tiger|rabbit|goat|wolf|otter", "vehicles": "truck|tram|bicycle|scooter|ferry|van",
          "clothes": "scarf|jacket|glove|sock|hat|skirt", "instruments": "violin|flute|drum|trumpet|harp|cello"}
DECISIONS = _table("""renting or buying a home|a cat or a dog as a pet|tea or coffee in the morning|a train or a plane
for a short trip|cooking or ordering dinner|studying alone or in a group|a laptop or a tablet for a student|a big city
or a small town|paper books or e-books|an early shift or a late shift|a gym or running outside|a used car or a new
car|cash or card payments|a beach holiday or a ski holiday|learning Spanish or Italian|a public school or home
schooling|email or a phone call for bad news|a full-time or a part-time job|gas or electric cooking|online or local
shopping|a window seat or an aisle seat|a houseplant or cut flowers as a gift""")
DECISION_FORMS = _table("""Which is better: {x}? Give reasons.|Compare {x} and list the advantages of each.|Help me
decide between {x}.|What should I think about when choosing between {x}?|List three pros and three cons for each
option: {x}.|{n} must choose between {x}. Think step by step and recommend one.|Write a balanced comparison: {x}.""")
CAUSES = _table("""the street is wet but the sky is clear|all shops are closed on a weekday|a plant's leaves turn
yellow|the lights in one room go out|a bakery sells out before noon|a bus arrives half an hour late|a clock shows the
wrong time every spring|a dog barks every evening at six|the milk tastes sour|the internet is slow at night|a new
restaurant is always empty|a car does not start on cold mornings|the office is empty at ten|a student's grades
suddenly improve|the river rises without local rain|the windows are covered in fog""")
CAUSE_FORMS = _table("""Suppose {c}. What are three possible explanations?|{n} notices that {c}. What is the most
likely cause?|What could be the reason if {c}?|If {c}, what should {n} check first, and why?""")
IFTHEN = _table("""All {a} are blue. Nothing blue is heavy. Can one of the {a} be heavy? Explain.|Some {a} belong to
{n}. Everything {n} owns is for sale. Are some {a} for sale?|No {a} are in the box. {n} took one thing from the box.
Could it be one of the {a}?|Every shop that sells {a} opens on {d}. A shop is closed on {d}. Does it sell {a}?|If it
rains on {d}, {n} buys {a}. It did not rain on {d}. Can we say whether {n} bought {a}?""")
SCENARIOS = _table("""What would happen if {s}? Think about short-term and long-term effects.|Imagine that {s}. Name
the winners and the losers.|List five consequences if {s}.|Would life be better if {s}? Argue for one side.""")
WHATIFS = _table("""people needed no sleep|all cars were shared|every school day started at noon|money did not exist
|phones stopped working for a week|everyone spoke one language|cities banned private cars|the work week had four days
|plastic was no longer produced|food could be printed at home|nobody could tell a lie|every house had a garden""")

# math: {n}, {m} are names; {a}, {b}, {c} are numbers
MATH = _table("""{n} has {a} apples and buys {b} more. Then {n} gives {c} to {m}. How many apples does {n} have now?
|A ticket costs {a} dollars. How much do {b} tickets cost, and what is left from {d} dollars?|{n} reads {a} pages
every day. How many pages does {n} read in {b} days?|What is {a} plus {b}, and then minus {c}?|Calculate {a} times {c}
and explain each step.|A train travels {d} kilometres in {c} hours. What is its average speed?|A box holds {c} eggs.
How many boxes are needed for {d} eggs?|{n} is {a} years old and {m} is {b} years older. What is the sum of their
ages?|The sides of a rectangle are {a} cm and {b} cm. Find its area and its perimeter.|What is {c} percent of
{d}?|Solve for x: {c}x + {a} = {d}.|A jacket costs {d} dollars and is reduced by {c} percent. What is the new price?
|{n} earns {a} dollars per hour and works {b} hours this week. How much does {n} earn?|Find the average of {a}, {b}
and {c}.|A class has {a} students and {b} of the chairs are broken. There are {d} chairs. How many good chairs remain
empty?|{n} and {m} share {d} dollars in the ratio {c} to 1. How much does each get?|Is {d} divisible by {c}? Show how
you know.|A recipe for {c} people uses {a} grams of rice. How much rice is needed for {b} people?|A tank has {d}
litres of water and loses {c} litres each hour. How much is left after {e} hours?|{n} saves {a} dollars each month.
How many months until {n} has at least {d} dollars?|What is the remainder when {d} is divided by {a}?|A bag has {a}
red and {b} green balls. What is the probability of drawing a red ball?|{n} walked {a} km on {w}, {b} km the next day
and {c} km after that. What is the total distance?|Write the next three terms: {a}, {f}, {g}, ...|Expand the
expression (x + {c})(x + {e}) and simplify it.|A square garden has a side of {a} metres. How much fence does {n} need
around it?|Convert {d} minutes into hours and minutes.|{n} buys {e} pens at {c} dollars each and a notebook for {a}
dollars. What is the total?""")

# coding
LANGUAGES = ["Python"] * 6 + _table("JavaScript|Java|C|C++|Go|Rust|TypeScript|Ruby")
CODE_TASKS = _table("""reverses a string|checks whether a word is a palindrome|returns the largest number in a list
|counts the vowels in a sentence|computes the factorial of n|returns the first n Fibonacci numbers|checks whether a
number is prime|sorts a list with bubble sort|finds an item by binary search|removes duplicates from a list|merges two
sorted lists|counts how often each word occurs in a text|converts Celsius to Fahrenheit|finds the greatest common
divisor of two numbers|sums the digits of an integer|checks whether two words are anagrams|flattens a nested list
|computes the average of a list|capitalises each word|returns the even numbers of a list|swaps two variables|prints a
multiplication table|transposes a matrix|checks whether a year is a leap year|reads a text file line by line|writes a
dictionary to a JSON file|finds the second smallest element|rotates a list by k places|converts a decimal number to
binary|counts down from ten to zero|validates an email address|generates a random password|finds all divisors of a
number|implements a stack|implements a queue|implements a linked list with insert and delete|checks for balanced
brackets|groups words by their first letter|computes the power of a number without built-in operators|finds the
longest word in a sentence|removes spaces from a string|splits a list into chunks|sums all odd numbers up to n|finds
the intersection of two arrays|computes the distance between two points|plays a number guessing game|converts seconds
into hours and minutes|replaces every space with a dash|finds the missing number from 1 to n|prints a triangle of
stars|calculates simple interest|parses a line of CSV|reads a number from the user and checks that it is
positive|sorts a list of dictionaries by a key|counts the nodes of a binary tree|performs a breadth-first
search|memoises a recursive function|computes the median of a list|models a bank account with deposit and
withdraw|stores contacts by name""")
CODE_FORMS = _table("""Write a {l} function that {t}.|Write {l} code that {t}.|How do I write a program in {l} that
{t}?|Show me a simple {l} example that {t}, with comments.|Please implement something in {l} that {t}, and explain how
it works.|Write a {l} function that {t}, then give two example calls.|Write a short {l} program that {t}. Handle wrong
input.|Give me {l} code that {t}, followed by unit tests.|I am new to {l}. Show me step by step how to make code that
{t}.|Write two different versions of a {l} function that {t} and compare them.|Write a {l} function with a docstring
or comment header that {t}.|What is the time complexity of code that {t}? Show it in {l}.|Create a {l} class or module
that {t}.|Write only the code: a {l} snippet that {t}.""")
CODE_TOPICS = _table("""a for loop|a while loop|recursion|a hash map|an array|a pointer|exception handling|a class and
an object|inheritance|a lambda function|a unit test|a variable's scope|string formatting|a REST API|an SQL join|a
regular expression|version control with git|a compiler|an interpreter|type hints|list slicing|a generator|a decorator
|a thread|asynchronous code|a database index|a cache|big O notation|a debugger|an environment variable|a docker
container|an HTML form|a CSS selector|an import statement|integer overflow|a boolean expression""")
CODE_TOPIC_FORMS = _table("""Explain {t} to a beginner programmer.|What is {t}, and when should I use it? Give a code
example.|What are common mistakes with {t}?|Write a short tutorial about {t}.|Give an example of {t} with a line by
line explanation.|Write five quiz questions about {t} with answers.|How is {t} used in real projects?""")
SNIPPETS = _table("""for i in range({a}): print(i * {b})|total = sum(x for x in range({a}) if x % {b} == 0)|names =
sorted(people, key=len)[:{b}]|while n > {b}: n = n // 2|squares = {{x: x * x for x in range({a})}}|def f(x): return x
if x < {b} else f(x - {b})|result = [word[:{b}] for word in text.split()]|if value > {a} or value < {b}:
raise ValueError(value)|pairs = list(zip(range({a}), reversed(range({a}))))
|print(' '.join(str(i) for i in range({b}, {a})))""")
SNIPPET_FORMS = _table("""What does this Python code do? {s}|Explain this line for a beginner: {s}|Rewrite this Python
code so that it is easier to read: {s}|Translate this Python code to JavaScript: {s}|Add comments and error handling
to this code: {s}|Write a function with a good name around this code: {s}""")

# extraction: {x} is a passage
PASSAGES = _table("""{n}, a {j} from {c}, opened a small shop on {d}, {k} {o}. The shop sells tea, soap and candles.
In the first week {a} customers came, and {m} helped at the counter.|The library in {c} will be closed from {d} to
repair the roof. {n}, who manages it, said the work costs {a} thousand dollars. Readers can use the branch near the
station until the end of {o}.|On {d} evening {n} lost a brown bag on the bus to {c}. It held a phone, {k} keys and a
blue notebook. {m}, a {j}, found it and took it to the driver.|The {c} running club met {a} times this year. {n} won
the race in {o} with {m} in second place. The next meeting is on {d} at {k} o'clock.|Order number {a}{k} was placed by
{n} on {d}. It contains {k} chairs and one table. The parcel will be sent to {c} in {o}. Questions go to {m} in
customer service.|{n} works as a {j} and lives in {c} with two children. Every {d} the family visits {m}, who has a
farm with {a} sheep. In {o} they all make cheese together.|The weather in {c} was unusual in {o}. It rained on {k}
days, and on {d} the wind broke {a} windows. {n}, a {j}, said that nobody was hurt.|A new cafe by {n} and {m} opens in
{c} this {o}. It has {a} seats, a garden and a small stage. On the first {d}, coffee is free for every {j}.|The
meeting on {d} was led by {n}. The team agreed to hire a {j}, to move the office to {c} in {o}, and to cut travel
costs by {k} percent. {m} disagreed with the move.|Flight {k}{a} from {c} was delayed on {d}. {n} and {m} waited {k}
hours and received a voucher for {a} dollars. They finally arrived in the first week of {o}.|The hotel in {c} was
clean, and the {j} we met at breakfast was kind. But the room on floor {k} was loud and cost {a} dollars. We left on
{d}. {n} will not return, while {m} would.""")
EXTRACT_ASKS = _table("""List all names of people in this text.|Summarise this text in one sentence.|Extract the name,
place and day as JSON.|Write three questions that this text answers.|Rewrite this text in a formal style.|Which
numbers appear in the text, and what do they mean?|Make a bullet list of the main facts.|Give this text a short
title.|Rewrite this text in simple words for a child.|Who is mentioned, and what did each person do?|Where and when
does this happen?|Turn this text into a short email.|Rewrite the text in the present tense.|Write a table with the
columns who, what and when.|Find the most important sentence and explain why.|Shorten this text to half its length.|Is
the tone positive, negative or neutral? Explain.|List all nouns in the first sentence.""")
EXTRACT_FORMS = _table("{q} {x}|Text: {x} Task: {q}|Read this passage. {x} {q}|{q} Here is the text: \"{x}\"")

# stem and humanities
STEM_TOPICS = _table("""gravity|photosynthesis|electric current|the water cycle|plate tectonics|black holes|DNA
|evolution by natural selection|the immune system|vaccines|the periodic table|chemical bonds|acids and bases|sound
waves|light and colour|magnetism|solar panels|wind turbines|nuclear fission|batteries|the greenhouse effect|the human
heart|the brain and memory|digestion|bacteria and viruses|antibiotics|cell division|enzymes|ocean
currents|hurricanes|earthquakes|volcanoes|the phases of the moon|the solar system|stars and their life
cycle|friction|inertia|pressure in fluids|heat transfer|steam engines|transistors|machine learning|the
internet|computer memory|GPS|radio waves|lasers|microscopes|telescopes|statistics and averages|probability|prime
numbers|the Pythagorean theorem|calculus|fossils|food chains|biodiversity|soil|insects and pollination|bird
migration|bridges and forces|concrete|recycling|3D printing""")
STEM_FORMS = _table("""Explain {t} in simple terms.|What is the main idea behind {t}?|Explain {t} to a
ten-year-old.|Why do we learn about {t} at school?|Give three examples related to {t}.|What are common
misunderstandings about {t}?|Write a short quiz about {t} with answers.|Describe a simple experiment about {t}.|How
did scientists learn about {t}?|Write a one-paragraph summary of {t}.|List the key terms needed to understand {t} and
define each.|What open questions remain about {t}?|Use an analogy to explain {t}.|Where do technology and industry
rely on {t}?|Explain {t} step by step.|Give five interesting facts about {t}.|Write lecture notes on {t} for high
school students.|What would happen without {t}?|Which other topics should I study before {t}, and why?|Explain the
difference between facts and myths about {t}.|How can a teacher make {t} fun?|Write a short dialogue between a student
and a teacher about {t}.|How do researchers measure or study {t}?|What careers are related to {t}?|Describe the
connection between {t} and the environment.|Explain {t} in exactly three sentences.|What are the limits of our
knowledge of {t}?|Write a glossary entry for {t}.""")
HUM_TOPICS = _table("""the Roman Empire|the French Revolution|the Industrial Revolution|ancient Egypt|the Silk
Road|the Renaissance|the First World War|the Cold War|the moon landing|democracy|human rights|free speech|the
Enlightenment|Greek tragedy|Shakespeare's plays|the novel|impressionist painting|classical music|jazz|folk
tales|mythology|Buddhism|the idea of justice|utilitarianism|stoicism|existentialism|the printing press|the abolition
of slavery|women's suffrage|the United Nations|globalisation|migration|urban growth|the Great
Depression|inflation|supply and demand|taxes|trade unions|the welfare state|colonialism|the Aztec civilisation|the
Ottoman Empire|the Mongol Empire|feudalism|the Black Death|the Olympic Games|language change|writing
systems|translation|propaganda|advertising|photography as art|cinema|architecture|public education|childhood in the
past|food and culture|fashion and society|religion and politics|museums|national identity|war poetry|the ethics of
lying|friendship in philosophy""")
HUM_FORMS = _table("""Write a short overview of {t}.|What are the main causes or origins of {t}?|What is the
importance of {t} today?|Explain {t} to someone who knows nothing about it.|Discuss two different opinions about
{t}.|Who were important people connected with {t}?|Write an essay introduction about {t}.|What changes did {t} bring
to everyday life?|List five key facts about {t}.|Give a timeline for {t} with short notes.|What can we learn from
{t}?|Suggest discussion questions about {t} for a class.|What are common myths about {t}?|Compare views of {t} now and
a hundred years ago.|Summarise {t} in three sentences.|What is the place of {t} in literature and art?|Name good and
bad effects of {t}, with one example each.|Write a letter in which a student explains {t} to a friend.|Write a short
museum text about {t}.|What is the connection between {t} and the economy?|What words and ideas should I know before
reading about {t}?|Write a dialogue between two historians about {t}.|How would you teach {t} in one lesson?|Describe
{t} from the point of view of an ordinary person.|What questions about {t} do scholars still debate?|Write a book
blurb for a popular history of {t}.|How did geography influence {t}?|Explain the link between {t} and power.""")


def _fill(forms: list[str], **tables: list[str]) -> list[str]:
    """Every form with every combination of the fillers in tables."""
    combos: list[dict[str, str]] = [{}]
    for key, values in tables.items():
        combos = [{**c, key: v} for c in combos for v in values]
    return [" ".join(f.format(**c).split()) for f in forms for c in combos]


def _writing(rng: random.Random) -> list[str]:
    emails = _fill(EMAILS, d=DAYS, n=NAMES[:8])
    out = rng.sample(_fill(_fill(EMAIL_FORMS, e=list(dict.fromkeys(emails)))), 330)
    return out + rng.sample([f"{a} {s}".strip() for a in _fill(WRITING_FORMS, t=WRITING_TOPICS)
                             for s in WRITING_STYLES], 1700)


def _roleplay(rng: random.Random) -> list[str]:
    return rng.sample(_fill(ROLE_FRAMES, p=PERSONAS, a=ROLE_ASKS), QUOTA["roleplay"])


def _reasoning(rng: random.Random) -> list[str]:
    out = _fill(DECISION_FORMS, x=DECISIONS, n=NAMES[:8]) + _fill(CAUSE_FORMS, c=CAUSES, n=NAMES[8:16])
    out = rng.sample(list(dict.fromkeys(out)), 560) + _fill(SCENARIOS, s=WHATIFS)
    things = [item + "s" for text in GROUPS.values() for item in _table(text) if item[-1] not in "hsy"]
    out += rng.sample(_fill(IFTHEN, a=things, n=NAMES[16:24], d=DAYS), 420)
    for _ in range(520):
        a, b, c, d = rng.sample(NAMES, 4)
        word = rng.choice(ORDERINGS)
        out.append(f"{a} is {word} than {b}. {b} is {word} than {c}. " + rng.choice((
            f"Is {a} {word} than {c}?", "Put the three people in order and explain.",
            f"{d} is {word} than {a}. Who comes last?", f"What do we know about {a} and {c}?")))
    for _ in range(420):
        one, two = rng.sample(sorted(GROUPS), 2)
        words = rng.sample(_table(GROUPS[one]), 3) + rng.sample(_table(GROUPS[two]), 1)
        rng.shuffle(words)
        out.append(rng.choice(("Which word does not belong: {}? Explain why.", "Find the odd one out: {}.",
                               "Sort these words into two groups and name the groups: {}."))
                   .format(", ".join(words)))
    return out


def _math(rng: random.Random) -> list[str]:
    out = []
    for _ in range(2400):
        n, m = rng.sample(NAMES, 2)
        a, b, c = rng.randint(12, 60), rng.randint(6, 40), rng.randint(2, 12)
        out.append(rng.choice(MATH).format(n=n, m=m, a=a, b=b, c=c, d=10 * rng.randint(8, 60), e=rng.randint(2, 7),
                                           f=a + c, g=a + 2 * c, w=rng.choice(DAYS)))
    return out


def _coding(rng: random.Random) -> list[str]:
    out = [rng.choice(CODE_FORMS).format(l=rng.choice(LANGUAGES), t=rng.choice(CODE_TASKS)) for _ in range(3200)]
    out += _fill(CODE_TOPIC_FORMS, t=CODE_TOPICS)
    for _ in range(560):
        code = rng.choice(SNIPPETS).format(a=rng.randint(10, 40), b=rng.randint(2, 9))
        out.append(rng.choice(SNIPPET_FORMS).format(s=code))
    return out


def _extraction(rng: random.Random) -> list[str]:
    out = []
    for _ in range(1900):
        n, m = rng.sample(NAMES, 2)
        text = rng.choice(PASSAGES).format(n=n, m=m, c=rng.choice(CITIES), j=rng.choice(JOBS), d=rng.choice(DAYS),
                                           o=rng.choice(MONTHS), a=rng.randint(12, 95), k=rng.randint(2, 9))
        out.append(rng.choice(EXTRACT_FORMS).format(q=rng.choice(EXTRACT_ASKS), x=text))
    return out


def training_prompts(seed: int = 0) -> list[dict[str, str]]:
    """All training prompts, distinct and in an order fixed by seed."""
    rng = random.Random(seed)
    makers: dict[str, Callable[[random.Random], list[str]]] = {
              "writing": _writing, "roleplay": _roleplay, "reasoning": _reasoning, "math": _math, "coding": _coding,
              "extraction": _extraction, "stem": lambda r: _fill(STEM_FORMS, t=STEM_TOPICS),
              "humanities": lambda r: _fill(HUM_FORMS, t=HUM_TOPICS)}
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    for category, quota in QUOTA.items():
        fresh = [p for p in dict.fromkeys(makers[category](rng)) if p not in seen and 5 <= len(p.split()) <= 120]
        picked = rng.sample(fresh, min(quota, len(fresh)))
        seen.update(picked)
        rows += [{"category": category, "prompt": p} for p in picked]
    rng.shuffle(rows)
    return rows


if __name__ == "__main__":
    for name in QUOTA:
        print(name, sum(row["category"] == name for row in training_prompts()))
