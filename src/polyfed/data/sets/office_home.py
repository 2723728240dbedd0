"""Office-Home: 65 kinds of everyday objects as art, clip art, product pictures and photographs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from polyfed.core.data_types import TrainsWith
from polyfed.data.declaration import Declaration, SplitCounts, augment_option, normalise_option, registered, size_option
from polyfed.data.formats.class_folders import SplitLists, find_class_folders, plain, split_in_turn
from polyfed.data.store.domain_files import DomainFiles

# fmt: off
CLASSES = (
    "Alarm_Clock", "Backpack", "Batteries", "Bed", "Bike", "Bottle", "Bucket", "Calculator", "Calendar", "Candles", "Chair",
    "Clipboards", "Computer", "Couch", "Curtains", "Desk_Lamp", "Drill", "Eraser", "Exit_Sign", "Fan", "File_Cabinet",
    "Flipflops", "Flowers", "Folder", "Fork", "Glasses", "Hammer", "Helmet", "Kettle", "Keyboard", "Knives", "Lamp_Shade",
    "Laptop", "Marker", "Monitor", "Mop", "Mouse", "Mug", "Notebook", "Oven", "Pan", "Paper_Clip", "Pen", "Pencil",
    "Postit_Notes", "Printer", "Push_Pin", "Radio", "Refrigerator", "Ruler", "Scissors", "Screwdriver", "Shelf", "Sink",
    "Sneakers", "Soda", "Speaker", "Spoon", "TV", "Table", "Telephone", "Toothbrush", "Toys", "Trash_Can", "Webcam",
)
# fmt: on
DOMAINS = ("art", "clipart", "product", "real_world")

FOLDER = "folder OfficeHomeDataset_10072016/<domain>/<class>/* (or office_home/, as DomainBed calls it)"
ARCHIVE = "archive OfficeHomeDataset_10072016 or office_home, .zip or .tar, of the same folders"
SPLIT = "stratified 90/10 with seed 0"
NAMES = ("OfficeHomeDataset_10072016", "office_home", "OfficeHome", "OfficeHomeDataset")
PLACES = {FOLDER: (*NAMES, ""), ARCHIVE: tuple(f"{name}{ending}" for name in NAMES for ending in (".zip", ".tar"))}
SIZES: Mapping[str, SplitCounts] = {
    domain: {"all": count} for domain, count in zip(DOMAINS, (2_427, 4_365, 4_439, 4_357), strict=True)
}


def find(root: Path, size: int, with_test: bool = True) -> list[DomainFiles]:
    folders = find_class_folders(root, PLACES, {plain(name): name for name in DOMAINS}, {plain(name): name for name in CLASSES})
    if folders is None:
        return []
    split = partial(split_in_turn, 0.1, with_test)
    lists: dict[str, SplitLists] = {domain: {} for domain in DOMAINS}
    return folders.domain_files(CLASSES, lists, origins=("", SPLIT), data_set="office_home", size=size, split=split)


OFFICE_HOME = Declaration(
    name="office_home",
    about="""Office-Home: 65 kinds of everyday objects as art, clip art, product pictures and photographs.

    A stratified split with seed 0 uses 90 % of each domain for training. The rest is assigned alternately to validation and test,
    class by class. With ``--unseen-part all``, a held-out domain is tested on all of its images.
    """,
    title="Office-Home",
    domains=DOMAINS,
    classes=CLASSES,
    splits="stratified 90/10 with seed 0",
    terms="non-commercial research and education (fair use notice of its page)",
    citation="Venkateswara et al. 2017",
    layouts=(FOLDER, ARCHIVE),
    expected={f"{layout}, {SPLIT}": SIZES for layout in PLACES},
    default_model="hfedf_cnn",
    trains_with=TrainsWith(lr=0.002),
    options=(
        size_option(64, "Side of the images: 32 for hFedF, 224 for gPerXAN."),
        augment_option(
            "flip", 'Augmentation of training batches: "domainbed" (hFedF), "flip_jitter" (gPerXAN); "flip" is polyfed\'s default.'
        ),
        normalise_option("imagenet"),
    ),
    page="https://www.hemanthdv.org/officeHomeDataset.html: OfficeHomeDataset_10072016.zip (packed or unpacked)",
    find=find,
    check_with={"with_test": False},
)

office_home = registered(OFFICE_HOME)
