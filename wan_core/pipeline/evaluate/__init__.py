"""What leaving forwards out costs in quality: calibration of MagCache's curves, and comparisons with the full run.

python -m wan_core calibrate --model tiny
python -m wan_core quality --model tiny --setting magcache:balanced --setting taylorseer:2/1 --count 24
"""
