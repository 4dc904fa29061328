"""What a written picture must be."""

from matplotlib.image import imread


def assert_picture(path):
    """Assert that a file is a picture of some size, and that something is drawn on it."""
    pixels = imread(path)[..., :3]
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 900
    assert (pixels.min(), pixels.max()) == (0.0, 1.0)
    assert 0.02 < (pixels < 1).any(axis=2).mean() < 0.9
