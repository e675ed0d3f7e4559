"""A generative adversarial network with two optimizers, as in the examples of PyTorch."""

import torch
from torch import nn, optim

nz, ngf, ndf, batch_size = 8, 8, 8, 16
torch.manual_seed(999)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1)


netG, netD = Generator().apply(weights_init), Discriminator().apply(weights_init)
criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
dataset = torch.rand(480, 1, 8, 8) * 2 - 1

for i, real in enumerate(dataset.split(batch_size)):
    # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
    netD.zero_grad()
    label = torch.ones(len(real))
    errD_real = criterion(netD(real), label)
    errD_real.backward()
    fake = netG(torch.randn(len(real), nz, 1, 1))
    errD_fake = criterion(netD(fake.detach()), label.fill_(0))
    errD_fake.backward()
    optimizerD.step()
    # (2) Update G network: maximize log(D(G(z)))
    netG.zero_grad()
    errG = criterion(netD(fake), label.fill_(1))
    errG.backward()
    optimizerG.step()
    if i % 10 == 0:
        print(f"[{i}] Loss_D: {(errD_real + errD_fake).item():.4f} Loss_G: {errG.item():.4f}")
torch.save({"G": netG.state_dict(), "D": netD.state_dict()}, "model.pt")
