"""The largest inputs that are read. Files come from strangers: each limit is checked before what it limits is parsed.

Each is several times what any model or video of this kind needs, and small enough that refusing or reading a hostile
file takes at most 5 CPU seconds and 1 GB of memory (`tools/fuzz.py` measures it).
"""

from __future__ import annotations

MIB = 2**20

MAX_HEADER = 16 * MIB
"""Bytes of the header of a safetensors or GGUF file. The largest Wan checkpoint has 0.2 MB, UMT5 as GGUF 6 MB."""
MAX_TENSORS = 20_000
"""Tensors in a file. A Wan transformer has 1,100, with scales 3,000."""
MAX_NAME = 256
"""Characters in a tensor's name. The longest of a Wan checkpoint or a LoRA has about 100."""
MAX_NAMES = MIB
"""Characters in all names of tensors together. A Wan checkpoint with scales has 0.2 million."""
MAX_DESCRIPTION = 4096
"""Bytes of JSON in a tensor that says how a module is quantised: about 100."""
MAX_PICKLE = MIB
"""Bytes of the pickle in a torch file, which has names and shapes only: 0.2 MB for the largest Wan checkpoint."""
MAX_DIRECTORY = 4 * MIB
"""Bytes of the list of members in a torch file's zip archive: about 80 for each tensor."""
MAX_JSON = 4 * MIB
"""Bytes of a JSON file (config, shard index, curve) and of JSON in metadata. The largest shard index has 0.2 MB."""
MAX_LINE = MIB
"""Characters in a line of a list of videos. The prompt is cut at 512 tokens."""
MAX_LIST = 256 * MIB
"""Characters in a list of videos: 2,700 in each line of the longest one."""
MAX_TOKENIZER = 16 * MIB
"""Bytes of a SentencePiece model. UMT5's has 4.5 MB."""
MAX_LATENTS = 2**27
"""Numbers in a file of latents. 81 frames at 1280x720 have 5 million."""

MAX_PICTURE_FILE = 256 * MIB
"""Bytes of a picture file."""
MAX_PICTURE = 52_000_000
"""Pixels of a picture: a camera of 50 megapixels."""
MAX_SIDE = 16_383
"""Pixels of a side of a picture or of a video's frames, read or written: WebP has no more, H.264 one more."""
MAX_VIDEO_SIDE = 8192
"""Pixels of a side of a video that is made."""
MAX_VIDEO_FILE = 1024 * MIB
"""Bytes of a video file."""
MAX_FRAME = 4096 * 2304
"""Pixels of a frame of a video that is read."""
MAX_VIDEO = 200_000_000
"""Pixels of all frames of a video that is read: 217 frames at 1280x720."""
MAX_DRIVING = 2_000_000_000
"""Pixels of all frames of a video that drives a long one: 2170 frames at 1280x720."""
MAX_FRAMES = 10_000
"""Frames of a video that is read."""
MAX_SECONDS = 21_600
"""Seconds that a video may last that is read by its times: six hours."""
MAX_SOUND = 64_000_000
"""Samples of a sound that is read, of all its channels: 11 minutes of stereo at 48,000 a second."""
