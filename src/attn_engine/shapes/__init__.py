"""Checks of shapes by names of axes, with a fix for shapes that do not fit."""
