"""How to run an unchanged script (launching), and to see its steps (steps), its collectives
(collectives), and what a rank reads and computes (rank; accelerated knows Accelerate, and torchrun
puts on the CPU what is for GPUs). verify.py makes runs comparable (exact, draws), finds what
differs (differences) and says it (wording).
"""
