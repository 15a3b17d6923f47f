"""The residual network of 20 layers for small images."""

from torch import Tensor, nn
from torch.nn import functional as F


class ResNet20(nn.Module):
    """Classify small images with a residual network of three stages of three blocks, widths 16, 32, 64.

    Images (B, in_channels, H, W) -> logits (B, num_classes). Shortcuts that change the shape are 1x1 convolutions.
    Source: He et al., Deep Residual Learning for Image Recognition, 2015, arXiv:1512.03385, section 4.2.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.stage1 = _stage(16, 16, stride=1)
        self.stage2 = _stage(16, 32, stride=2)
        self.stage3 = _stage(32, 64, stride=2)
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Give the logits of a batch of images."""
        x = F.relu(self.bn(self.conv(images)))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.fc(x.mean(dim=(2, 3)))


class _Block(nn.Module):
    """Add to the input what two 3x3 convolutions make of it."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def _stage(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        _Block(in_channels, out_channels, stride),
        _Block(out_channels, out_channels, 1),
        _Block(out_channels, out_channels, 1),
    )
