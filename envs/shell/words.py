"""The words that shell tasks are made of: short, common, lower-case, and (checked by a test) distinct."""

from __future__ import annotations

import re


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\S+", text))


STEMS = _words("""
    notes report list names data orders sales people items users events prices cities books songs tasks lines logs
    memo draft plan budget stock guests movies recipes grades scores points visits sensors rooms trips votes cards
    teams games pages words photos plants animals fruits colors tools parts boxes letters numbers dates times years
    days weeks months stations routes flights trains boats cars bikes roads rivers lakes hills farms shops banks
    schools offices hotels parks museums doctors nurses pilots drivers writers actors singers clients vendors staff
    members owners payments invoices returns stats totals samples tests trials results records entries summary index
    backup history journal diary agenda minutes wishlist inventory catalog archive roster ledger survey forecast
""")
"""File names without their extension."""

DIRECTORIES = _words("""
    old new backup archive docs src lib assets images music videos scripts config cache output input shared public
    private drafts final review pending done daily weekly monthly store vault media local remote main extra misc
    team work home school project client export import upload download inbox outbox temp spare stage north south
    east west alpha beta gamma delta omega
""")

EXTENSIONS = _words("txt md log csv json py html css xml yaml ini cfg")

WORDS = _words("""
    apple river stone cloud tiger piano garden silver winter candle bridge forest orange rocket window mountain coffee
    pencil island button castle dragon engine falcon guitar hammer insect jacket kettle ladder magnet needle ocean
    pepper quartz ribbon saddle temple urchin velvet walnut yellow zebra anchor basket camera desert ember feather
    goblin harbor igloo jungle kitten lemon marble nickel oyster pillow rabbit shadow tunnel violin wagon acorn
    beacon cactus dolphin eagle flute grape honey iron jelly koala lantern meadow north olive panda quiver raven
    salmon thunder umbrella valley willow canyon puzzle barrel copper donkey fabric glacier hazel ivory juniper
    kayak lizard mirror nutmeg otter planet rover sunset turtle vapor whistle yogurt zephyr bronze cherry daisy
""")
"""What text files are made of. No word is part of another, so that a search for one finds only that one."""

CITIES = _words("""
    oslo paris rome lima cairo delhi tokyo seoul quito accra berlin madrid lisbon vienna dublin athens prague warsaw
    boston denver dallas miami austin havana nairobi tunis lagos dakar perth sydney hanoi manila jakarta kabul riga
    sofia zurich geneva lyon porto turin milan naples genoa bonn essen ghent malmo bergen tampere
""")
