"""The network of the examples."""

from mindspore import nn


class LeNet5(nn.Cell):
    """LeNet5 for 1x32x32 images (Y. LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998)."""

    def __init__(self, num_class=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, pad_mode="valid")
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid")
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.relu = nn.ReLU()
        self.flatten = nn.Flatten()
        self.fc1 = nn.Dense(16 * 5 * 5, 120)
        self.fc2 = nn.Dense(120, 84)
        self.fc3 = nn.Dense(84, num_class)

    def construct(self, images):
        features = self.pool(self.relu(self.conv1(images)))
        features = self.pool(self.relu(self.conv2(features)))
        hidden = self.relu(self.fc1(self.flatten(features)))
        return self.fc3(self.relu(self.fc2(hidden)))
