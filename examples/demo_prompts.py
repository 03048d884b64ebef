"""Prompts for the demo pair, in three domains: code, math, chat.

    python examples/demo_prompts.py FOLDER

writes train.jsonl (shuffled, so that any beginning of it is a fair sample), one
held-out-DOMAIN.jsonl per domain, and sources.json: what went in, with hashes. Only prompts are made
here; `longspark data regenerate` has the target answer them.

Held out are whole templates and whole source files, never single fillings: what is measured on
them was not seen in training in another wording. A template is held out if its line below begins
with "!"; a module of the standard library, a file of dialogs or a category of problems if
`held_out` says so.

Sources besides the templates: functions of the running Python's standard library (PSF-2.0), problem
texts of champ-dataset 1.0.0 (MIT), first lines of the English dialogs of chatterbot-corpus 1.3.3
(BSD-3-Clause). The last two are fetched with pip as wheels, read as data, and never installed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

WHEELS = {"champ-dataset": "1.0.0", "chatterbot-corpus": "1.3.3"}
HELD_OUT_PER_DOMAIN = 32
FILLINGS = {"code": 16, "math": 24, "chat": 20}  # of each training template
HELD_OUT_FILLINGS = 8

SLOTS: dict[str, str] = {
    "name": "Anna|Ben|Carla|David|Emma|Farid|Grace|Hugo|Ines|Jonas|Kira|Liam|Maya|Noah|Olga|Paul"
    "|Rosa|Sam|Tara|Victor|Wei|Yusuf|Zoe|Lucy|Tom",
    "thing": "apples|books|pencils|marbles|stickers|cookies|coins|eggs|balloons|tickets|stamps"
    "|shells|oranges|cards|bottles|candles|flowers|toys|chairs|buttons",
    "shop": "bakery|bookshop|market|library|school|toy store|farm|cinema|garden centre|museum",
    "n": "*3-30",
    "m": "*2-12",
    "k": "*2-9",
    "big": "*40-400",
    "percent": "5|10|15|20|25|30|40|50|60|75",
    "price": "*2-60",
    "vehicle": "train|car|bus|bicycle|boat|truck",
    "speed": "*20-120",
    "hours": "*2-9",
    "shape": "rectangle|room|garden|field|poster|table top",
    "animal": "cat|dog|fox|owl|rabbit|turtle|whale|horse|mouse|bear|elephant|penguin|dragon|crow",
    "place": "a small village|the mountains|a lighthouse|an old library|the desert|a big city"
    "|a quiet forest|an island|a space station|a castle|a fishing harbour|a winter town",
    "object": "a lost key|an old map|a broken clock|a red umbrella|a letter|a strange stone"
    "|a musical box|a lantern|a paper boat|a silver coin|a book without words",
    "feeling": "happy|nervous|lonely|curious|tired|proud|angry|hopeful|worried|grateful",
    "topic": "photosynthesis|gravity|the water cycle|volcanoes|inflation|democracy|vaccines|"
    "black holes|earthquakes|the internet|electric cars|recycling|the immune system|sleep|tides|"
    "evolution|climate change|rainbows|bees|the moon|glaciers|magnets|DNA|the heart|bread making",
    "city": "Paris|Rome|Tokyo|Cairo|Lisbon|Berlin|Toronto|Sydney|Mumbai|Lima|Oslo|Athens|Seoul",
    "country": "France|Japan|Brazil|Egypt|Canada|India|Kenya|Norway|Mexico|Italy|Greece|Vietnam",
    "hobby": "gardening|photography|running|chess|painting|cooking|cycling|knitting|swimming"
    "|playing the guitar|bird watching|hiking|learning a language|pottery|dancing",
    "food": "tomato soup|pancakes|a vegetable curry|apple pie|rice and beans|a green salad|"
    "mushroom risotto|chocolate cake|fried noodles|lentil stew|an omelette|banana bread",
    "job": "teacher|nurse|software engineer|baker|pilot|farmer|carpenter|journalist|librarian"
    "|electrician|designer|scientist|chef|lawyer|mechanic",
    "event": "a birthday party|a school trip|a job interview|a wedding|a team meeting|a long flight"
    "|a picnic|a camping weekend|an exam|a concert|a marathon",
    "product": "a water bottle|a backpack|wireless headphones|a coffee machine|a desk lamp|running"
    " shoes|a smart watch|an electric kettle|a board game|a bicycle helmet|a notebook",
    "season": "spring|summer|autumn|winter",
    "sentence": "The meeting was moved to Friday because the manager is ill.|Me and him goes to "
    "school every day.|I can't believe how fast the time has gone by.|The results of the study was "
    "not what we expected.|She don't like coffee but she drink tea.|We are sorry to tell you that "
    "your order will be late.|The old house at the end of the street is for sale.|He said that he "
    "will come tomorrow, but I doubt it.|Please send me the report as soon as possible.|Their dog "
    "runned away last night.|The weather forecast says it will rain all week.|I has two brother "
    "and one sisters.|The movie was boring and too long.|Our team finished the project two weeks "
    "early.|There is many reasons to learn a new language.",
    "paragraph": "Honey bees live in colonies with a single queen. Worker bees collect nectar, "
    "build the comb and feed the young. In winter they form a cluster to keep warm.|The city "
    "opened a new park last week. It has a playground, a small lake and space for outdoor "
    "concerts. Local shops hope that it will bring more visitors.|Regular exercise improves the heart, the "
    "muscles and the mood. Doctors recommend at least thirty minutes a day. Walking counts too.|"
    "The printing press changed Europe in the fifteenth century. Books became cheaper, and more "
    "people learned to read. New ideas spread faster than before.|Many people work from home "
    "today. They save time on the way to work, but some miss their colleagues. Companies look for "
    "a good mixture.|Rivers carry sand and stones to the sea. Where the water slows down the sand "
    "sinks. Over thousands of years this builds a delta.|A library is more than a place for books. "
    "It offers computers, quiet rooms and courses. For many students it is the best place to "
    "learn.|Plants need light, water and carbon dioxide. In their leaves they make sugar and "
    "release oxygen. Without them there would be no animals.|The museum shows paintings from three "
    "centuries. The oldest is a small portrait of a merchant. Visitors may take photographs "
    "without flash.|Batteries store energy in chemical form. Over time they lose capacity. Heat "
    "and full discharge make them age faster.",
    "language": "Python|Python|Python|JavaScript|Java|C|Rust|Go",
    "task": "reverses a string|checks whether a number is prime|computes the factorial of a number"
    "|returns the n-th Fibonacci number|counts the vowels in a text|sorts a list of numbers without"
    " using the built-in sort|finds the largest element of a list|removes duplicates from a list"
    "|checks whether a word is a palindrome|merges two sorted lists|finds the most common word in a"
    " text|converts Celsius to Fahrenheit|computes the greatest common divisor of two numbers|"
    "flattens a nested list|counts how often each letter occurs|validates an email address|"
    "performs a binary search|transposes a matrix|generates all permutations of a list|sums the "
    "digits of a number|splits a list into chunks of equal size|rotates a list by k places|finds "
    "the second largest number|checks whether two words are anagrams|computes the average of a list"
    "|converts a number to binary|finds the longest word in a sentence|removes all punctuation",
    "structure": "stack|queue|linked list|binary tree|hash table|priority queue|graph|set|deque"
    "|trie|ring buffer|dictionary|heap",
    "entity": "bank account|shopping cart|library book|student|car|temperature sensor|playlist"
    "|parking lot|recipe|inventory item|chess board|contact list|calendar event|vending machine",
    "concept": "recursion|list comprehensions|inheritance|exceptions|decorators|generators|closures"
    "|lambda functions|dictionaries|threads|type hints|unit tests|regular expressions|hash tables"
    "|Big O notation|polymorphism|context managers|iterators|garbage collection|version control",
    "format": "CSV|JSON|text|XML|log|INI",
    "sql": "the total sales per customer|the ten newest orders|all employees without a manager|the "
    "average salary per department|customers who never ordered|the number of visits per month|"
    "products that are out of stock|the most expensive product of each category",
    "bug": "for i in range(len(items)):\n    if items[i] == 0:\n        items.remove(items[i])"
    "|def add(item, items=[]):\n    items.append(item)\n    return items"
    "|def mean(values):\n    total = 0\n    for v in values:\n        total += v\n    return total"
    " / len(value)|while n > 0:\n    print(n)|def is_even(n):\n    return n % 2 = 0"
    "|x = input('Number: ')\nprint(x + 1)|def last(items):\n    return items[len(items)]"
    "|def find(d, key):\n    if d[key] == None:\n        return 'missing'\n    return d[key]",
}

# ruff: noqa: E501
# One template a line; {slot} is filled from SLOTS, and {slot2} from the same list again.
TEMPLATES: dict[str, str] = {
    "math": """
{name} has {n} {thing} and buys {m} more. How many {thing} does {name} have now?
{name} has {big} {thing} and gives {n} of them to {name2}. How many {thing} are left?
A {shop} sells {thing} for ${price} each. How much do {m} of them cost?
!A {vehicle} travels at {speed} miles per hour for {hours} hours. How far does it go?
{name} reads {n} pages every day. How many pages does {name} read in {m} weeks?
There are {m} boxes with {n} {thing} in each box. {name} takes out {k}. How many {thing} remain?
What is {percent}% of {big}? Show your work.
A jacket costs ${big}. It is on sale for {percent}% off. What is the sale price?
!{name} and {name2} share {big} {thing} equally among {k} friends. How many does each friend get?
Calculate {big} + {n} * {m}. Explain each step.
Solve for x: {k}x + {n} = {big}
Solve the equation {m}x - {n} = {k} and check the answer.
The {shape} is {n} meters long and {m} meters wide. What are its area and its perimeter?
!Find the next three numbers in the sequence {k}, {m}, {n} and explain the rule you used.
A {vehicle} covers {big} kilometers in {hours} hours. What is its average speed?
{name} saves ${price} every month. How long does it take {name} to save ${big}?
What is the average of {k}, {m}, {n} and {price}?
If {k} workers build a wall in {n} days, how long do {m} workers need? Explain.
!A class has {n} girls and {m} boys. What fraction of the class are girls? Simplify it.
Simplify the fraction {n}/{big} and write it as a decimal number.
{name} earns ${price} per hour and works {hours} hours a day for {k} days. How much does {name} earn?
{name} is {m} years older than {name2}. Together they are {big} years old. How old is each of them?
A recipe for {k} people needs {n} {thing}. How many {thing} are needed for {m} people?
Convert {big} minutes to hours and minutes.
The radius of a circle is {m} cm. Calculate its area and circumference.
!What is the probability of drawing a red ball from a bag with {n} red and {m} blue balls?
Factor the expression x^2 + {m}x + {k} or explain why it cannot be factored.
Is {big} a prime number? Explain how you know.
Write {big} as a product of prime numbers.
{name} bought {m} {thing} for ${k} each and paid with a $100 bill. How much change does {name} get?
Explain to a child how to multiply {n} by {m}.
!{name} walks {n} blocks to the {shop} and {m} blocks back by another way, every day for {k} days. How many blocks is that in total?
Compute the derivative of f(x) = {k}x^{m} + {n}x.
What is the greatest common divisor of {big} and {n}?
A tank holds {big} liters and loses {k} liters per hour. When is it empty?
""",
    "code": """
Write a {language} function that {task}.
Write a Python function that {task}. Include a docstring and an example.
!Implement a function in Python that {task}, and write three assert statements that test it.
Write a {language} program that reads a number from the user and {task}.
Explain how a {structure} works and give a short {language} example.
!Implement a {structure} in {language} with methods to add and remove elements.
Write a Python class for a {entity}.
Write a {language} class that represents a {entity} with at least three methods.
!Design a Python class hierarchy for a {entity} and show how to use it.
Explain {concept} in Python with an example.
What is the difference between {concept} and {concept2}?
Write a Python script that reads a {format} file and prints the number of lines.
Write a Python script that converts a {format} file to {format2}.
!How do I read a {format} file in Python and handle the error when it does not exist?
Write an SQL query that returns {sql}.
Find the bug in this code and fix it:\\n\\n{bug}
What does this code do, and what is wrong with it?\\n\\n{bug}
!Review this code like a colleague and suggest improvements:\\n\\n{bug}
Write unit tests for a Python function that {task}.
Give me five tips on using {concept} well.
How can I make a Python function that {task} faster?
Write a bash command that finds all {format} files larger than {n} megabytes.
Write an HTML page with a form for a {entity}.
Write a regular expression that matches a date, and explain it for someone who knows {concept}.
Translate this Python code to JavaScript:\\n\\n{bug}
""",
    "chat": """
Write a short story about a {animal} who finds {object} in {place}.
Write a story about {name}, a {job} who lives in {place}.
!Write a short bedtime story about a {feeling} {animal} in {season}.
Write a poem about {season} in {place}.
Write a haiku about a {animal}.
!Write a four-line rhyme about {object} and a {animal}.
Explain {topic} in simple terms.
Explain {topic} to a ten-year-old.
What are the main causes and effects of {topic}?
!Give me three surprising facts about {topic}.
What should I see in {city} in two days?
Tell me about the culture of {country}.
!Plan a weekend in {city} for a family that likes {hobby}.
Give me five tips for someone who wants to start {hobby}.
Why is {hobby} a good hobby?
How do I make {food}?
Write a recipe for {food} with a list of ingredients.
!I have guests tonight. What can I serve with {food}, and how do I prepare it?
What does a {job} do all day?
Write a cover letter for a position as a {job}.
!Write three interview questions for a {job} and good answers to them.
How should I prepare for {event}?
Write an invitation to {event}.
Write a checklist for {event} in {season}.
Write a polite email to a colleague who is {feeling} about {event}.
!Write a product description for {product}.
Write an advertisement for {product} in three sentences.
Correct the grammar of this sentence: {sentence}
Rewrite this sentence in a more formal way: {sentence}
!Rewrite this sentence so that a child understands it, then explain your changes: {sentence}
Summarize this text in one sentence: {paragraph}
Rewrite this text in your own words: {paragraph}
Write a title and three keywords for this text: {paragraph}
!Continue this text with two more paragraphs: {paragraph}
Write a dialogue between a {job} and a {animal} about {topic}.
Write a dialogue between {name} and {name2}, who are both {feeling}.
Make a list of ten words about {season} and use three of them in sentences.
What are the advantages and disadvantages of being a {job}?
I feel {feeling} today. What can I do?
Compare {city} and {city2} as places to live.
Write a letter from {name} to {name2} about {object}.
Write a short speech about {topic} for {event}.
Describe {place} in {season}, using all five senses.
""",
}

CODE_TASKS = [
    "Explain what this Python function does:\n\n```python\n{code}\n```",
    "Write a docstring for this function:\n\n```python\n{code}\n```",
    "Rewrite this function with type hints:\n\n```python\n{code}\n```",
    "Add comments to this code:\n\n```python\n{code}\n```",
    "Simplify this Python code if you can:\n\n```python\n{code}\n```",
]
COMPLETE = "Complete this Python function:\n\n```python\n{code}\n```"
CHAMP_TASKS = [
    "{text}",
    "Solve this problem step by step: {text}",
    "Give a hint, then the answer: {text}",
]


def held_out(source: str) -> bool:
    """Whether a source file or category is never trained on: about one in eight, by its name."""
    return int(hashlib.sha256(source.encode()).hexdigest(), 16) % 8 == 0


def fill(template: str, draw: random.Random) -> str:
    """The template with every slot filled; {slot} and {slot2} never get the same text."""
    used: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        slot = match[1]
        if slot not in used:
            choices = SLOTS[slot.rstrip("2")]
            while True:
                if choices.startswith("*"):
                    low, high = choices[1:].split("-")
                    text = str(draw.randint(int(low), int(high)))
                else:
                    text = draw.choice(choices.split("|"))
                if text not in used.values() or choices.startswith("*"):
                    break
            used[slot] = text
        return used[slot]

    return re.sub(r"\{([a-z]+2?)\}", value, template.replace("\\n", "\n"))


def from_templates(draw: random.Random) -> Iterator[tuple[str, bool, str]]:
    """(domain, held out, prompt) of every filling."""
    for domain, lines in TEMPLATES.items():
        for line in lines.strip().splitlines():
            hold = line.startswith("!")
            for _ in range(HELD_OUT_FILLINGS if hold else FILLINGS[domain]):
                yield domain, hold, fill(line.removeprefix("!"), draw)


def from_standard_library(draw: random.Random) -> Iterator[tuple[str, bool, str]]:
    """Tasks on functions of 4 to 24 lines, at most eight of a module."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "idle_test", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if skipped & set(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = text.splitlines()
        found = []
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and 4 <= node.end_lineno - node.lineno < 24:
                body = lines[node.lineno - 1 : node.end_lineno]
                indent = len(body[0]) - len(body[0].lstrip())
                found.append("\n".join(line[indent:] for line in body))
        for code in draw.sample(found, min(8, len(found))):
            if draw.random() < 0.3:
                half = code.splitlines()
                prompt = COMPLETE.replace("{code}", "\n".join(half[: max(2, len(half) // 2)]))
            else:
                prompt = draw.choice(CODE_TASKS).replace("{code}", code)
            yield "code", held_out(path.relative_to(root).as_posix()), prompt


def from_wheels(draw: random.Random, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Problem texts and first lines of dialogs."""
    import yaml

    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += ["--dest", str(work), *(f"{name}=={version}" for name, version in WHEELS.items())]
    subprocess.run(pip, check=True, stdout=sys.stderr)
    (champ,) = work.glob("champ_dataset-*.whl")
    with zipfile.ZipFile(champ) as archive:
        problems = json.loads(archive.read("champ_dataset/dataset_files/v0.json"))["problems"]
    for name, problem in sorted(problems.items()):
        task = draw.choice(CHAMP_TASKS)
        # By category: P_Polynomial_7 -> Polynomial.
        yield "math", name.split("_")[1] == "Sequence", task.replace("{text}", problem["_text"])
    (dialogs,) = work.glob("chatterbot_corpus-*.whl")
    with zipfile.ZipFile(dialogs) as archive:
        for name in sorted(archive.namelist()):
            if "/english/" in name and name.endswith(".yml"):
                for turns in yaml.safe_load(archive.read(name))["conversations"]:
                    yield "chat", held_out(Path(name).name), str(turns[0])


def make_prompts(folder: Path, seed: int = 0) -> None:
    """Write the files; the same seed and the same sources give the same files."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as work:
        everything = [
            *from_templates(draw),
            *from_standard_library(draw),
            *from_wheels(draw, Path(work)),
        ]
    draw.shuffle(everything)
    train: dict[str, str] = {}
    apart: dict[str, list[str]] = {domain: [] for domain in TEMPLATES}
    for domain, hold, prompt in everything:
        if hold:
            if prompt not in apart[domain] and len(apart[domain]) < HELD_OUT_PER_DOMAIN:
                apart[domain].append(prompt)
        else:
            train.setdefault(prompt, domain)
    for prompt in [prompt for prompts in apart.values() for prompt in prompts]:
        train.pop(prompt, None)  # sources may say the same
    folder.mkdir(parents=True, exist_ok=True)
    files = {"train.jsonl": [{"prompt": p, "domain": d} for p, d in train.items()]}
    for domain, prompts in apart.items():
        files[f"held-out-{domain}.jsonl"] = [{"prompt": p, "domain": domain} for p in prompts]
    report: dict[str, object] = {"python": platform.python_version(), **WHEELS, "seed": seed}
    for name, records in files.items():
        path = folder / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        report[name] = {"prompts": len(records), "sha256": digest}
        print(f"{path}: {len(records)} prompts")
    (folder / "sources.json").write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the files")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_prompts(options.folder, options.seed)


if __name__ == "__main__":
    main()
