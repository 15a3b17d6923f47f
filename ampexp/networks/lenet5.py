"""LeNet-5, two convolutions and three linear layers."""

from torch import Tensor, nn
from torch.nn import functional as F

from ampexp.messages import UserError, refusal


class LeNet5(nn.Module):
    """Classify square images with LeNet-5, in its common form with ReLU and max pooling.

    Images (B, in_channels, image_size, image_size) -> logits (B, num_classes). Raises UserError for images smaller
    than 16x16, of which the second convolution would leave nothing.
    Source: LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, image_size: int = 32) -> None:
        super().__init__()
        if image_size < 16:
            raise UserError(
                refusal("image_size of LeNet5", "an integer of at least 16", image_size)
            )
        side = ((image_size - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(in_channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Give the logits of a batch of images."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        return self.fc3(x)
