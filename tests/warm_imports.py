"""What the process imports that tests/warm.py forks ranks from: all that a script would."""
# ruff: noqa: F401

import evaluate
import setuptools
import sklearn.datasets
import sklearn.model_selection
import torchvision.datasets

import planning.libraries
