"""Where weights are while a video is made, and how much memory that takes."""
