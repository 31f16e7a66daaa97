"""Packages of models: folders or zip files with a manifest."""
