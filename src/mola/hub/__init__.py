"""Folders for a model hub: networks, posterior and a model card with what was measured. Nothing is sent or fetched."""

from mola.hub.card import Measured, measure
from mola.hub.folder import load_from_hub_folder, save_to_hub_folder

__all__ = ["Measured", "load_from_hub_folder", "measure", "save_to_hub_folder"]
