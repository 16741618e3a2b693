"""Pages of `tideserve simulate --paper`: figures of a paper beside the simulator's."""

from enum import StrEnum


class Paper(StrEnum):
    """Papers with a page."""

    KUNSERVE = "kunserve"
    CONSERVE = "conserve"
    BROS = "bros"
    BUCKETSERVE = "bucketserve"
