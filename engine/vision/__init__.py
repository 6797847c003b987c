"""Images in prompts: which families of models see, what their processors make of an image, the tokens that
stand for it, and the features that a model has in their place."""

from __future__ import annotations

from engine.vision.features import Sight, largest_image
from engine.vision.processing import ImageProcessor
from engine.vision.prompt_images import PromptImages
from engine.vision.seeing import SEEING, Seeing, seeing, sees

__all__ = ["SEEING", "ImageProcessor", "PromptImages", "Seeing", "Sight", "largest_image", "seeing", "sees"]
