"""Tests against a real server. A package, so that file names may repeat those of other folders."""
